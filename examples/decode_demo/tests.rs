//! Tests of the decoder: graphs made by hand, and the sampled shots against PyMatching.

use std::fs;
use std::path::{Path, PathBuf};

use super::dataset::Dataset;
use super::decoder::{MatchingDecoder, MatchingGraph};
use super::model::{DetectorErrorModel, ModelError};

/// The folder with the sampled shots.
fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data")
}

/// The matching graph of a model that is known to parse.
fn graph(text: &str) -> Result<MatchingGraph, ModelError> {
    let model = DetectorErrorModel::parse(text).expect("the model is valid");
    MatchingGraph::from_model(&model)
}

/// A decoder for a model that is known to be usable.
fn decoder(text: &str) -> MatchingDecoder {
    MatchingDecoder::new(&graph(text).expect("the model is usable"))
}

#[test]
fn decodes_a_repetition_code() {
    // Boundary, D0, D1, …, D8, boundary in a row: nine detectors, so a syndrome has two bytes.
    let mut text = String::from("error(0.1) D0 L0\nerror(0.1) D8 L3\n");
    for left in 0..8 {
        text += &format!("error(0.1) D{left} D{}\n", left + 1);
    }
    let mut decoder = decoder(&text);
    assert_eq!(decoder.syndrome_bytes(), 2);
    // Twice, as a solver that was not cleared would still know the earlier shots.
    for _ in 0..2 {
        assert_eq!(decoder.decode(&[0, 0]), 0);
        assert_eq!(decoder.decode(&[0b0000_0001, 0]), 1);
        assert_eq!(decoder.decode(&[0b0000_0000, 1]), 1 << 3);
        assert_eq!(decoder.decode(&[0b0000_0001, 1]), 1 | 1 << 3);
        assert_eq!(decoder.decode(&[0b0001_1000, 0]), 0);
        assert_eq!(decoder.decode(&[0b0111_0000, 0]), 1 << 3);
        // Padding is ignored; bytes that are missing hold no events.
        assert_eq!(decoder.decode(&[0b0000_0001, 0b1111_1110, 0xff]), 1);
        assert_eq!(decoder.decode(&[0b0000_0001]), 1);
        assert_eq!(decoder.decode(&[]), 0);
    }
}

#[test]
fn merges_independent_parallel_edges() {
    // In either order of the end points: 0.1 · 0.8 + 0.2 · 0.9 = 0.26.
    let boundary = "error(0.01) D0\nerror(0.01) D1\n";
    let apart = graph(&format!("error(0.1) D0 D1 L0\nerror(0.2) D1 D0 L0\n{boundary}"));
    let merged = graph(&format!("error(0.26) D0 D1 L0\n{boundary}"));
    assert_eq!(apart, merged);
    // Also on the way to the boundary, and across the components of one error.
    let apart = graph("error(0.1) D0 L0 ^ D1\nerror(0.2) D0 L0 ^ D1");
    let merged = graph("error(0.26) D0 L0 ^ D1");
    assert_eq!(apart, merged);
}

#[test]
fn keeps_the_likelier_of_parallel_edges_with_other_observables() {
    let kept = graph("error(0.2) D0 L1");
    assert_eq!(graph("error(0.2) D0 L1\nerror(0.1) D0 L0"), kept);
    assert_eq!(graph("error(0.1) D0 L0\nerror(0.2) D0 L1"), kept);
}

#[test]
fn leaves_out_errors_that_cannot_be_decoded() {
    let plain = graph("error(0.1) D0");
    // Unseen by any detector, or impossible.
    assert_eq!(graph("error(0.1) D0\nerror(0.2) L0"), plain);
    assert_eq!(graph("error(0.1) D0\nerror(0.0) D0 L0"), plain);
    assert_eq!(decoder("").decode(&[0xff]), 0);
}

#[test]
fn refuses_models_without_a_matching_graph() {
    for (text, message) in [
        ("error(0.1) D0\nerror(0.1) D0 D1 D2", "line 2: 3 detectors in one component"),
        ("error(0.5) D0", "line 1: probability 0.5 gives no positive weight"),
        ("error(0.1) D0\nerror(0.1) D1 D2", "no errors join detector 1 to the boundary"),
        ("error(0.1) D0\nerror(0.4999999999999999) D1", "the error probabilities are too far apart"),
    ] {
        let error = graph(text).expect_err("the model is unusable");
        assert_eq!(error.to_string(), message);
    }
}

/// Decodes a data set and compares the logical errors with PyMatching's.
fn compare_with_pymatching(distance: u32) {
    let set = Dataset::load(&data(), distance).expect("the data set is complete");
    let description = set.description();
    let graph = graph(set.model()).expect("the model is usable");
    let mut decoder = MatchingDecoder::new(&graph);
    assert_eq!(decoder.syndrome_bytes(), description.bytes_per_shot);

    let (mut undecoded, mut theirs, mut ours, mut agreed) = (0, 0, 0, 0);
    for shot in 0..description.shots {
        let (truth, prediction) = (set.observable(shot), set.pymatching(shot));
        let flips = decoder.decode(set.shot(shot));
        assert!(flips <= 1, "the model has one observable");
        undecoded += usize::from(truth);
        theirs += usize::from(prediction != truth);
        ours += usize::from((flips == 1) != truth);
        agreed += usize::from((flips == 1) == prediction);
    }
    println!(
        "{}: {ours} logical errors, PyMatching {theirs}, undecoded {undecoded}; \
         {agreed} of {} predictions agree",
        description.name, description.shots
    );
    assert_eq!(undecoded, description.raw_flips);
    assert_eq!(theirs, description.pymatching_logical_errors);
    // Where two matchings have the same weight, either is right.
    let tolerance = (theirs / 20).max(3);
    assert!(ours.abs_diff(theirs) <= tolerance, "{ours} against {theirs}");
    assert!(agreed * 100 > description.shots * 99, "{agreed} agree");
}

#[test]
fn distance_3_is_as_good_as_pymatching() {
    compare_with_pymatching(3);
}

#[test]
fn distance_5_is_as_good_as_pymatching() {
    compare_with_pymatching(5);
}

#[test]
fn distance_7_is_as_good_as_pymatching() {
    compare_with_pymatching(7);
}

#[test]
fn survives_any_syndrome() {
    let set = Dataset::load(&data(), 3).expect("the data set is complete");
    let mut decoder = MatchingDecoder::new(&graph(set.model()).expect("the model is usable"));
    let first = decoder.decode(set.shot(0));
    // Every detector alone, all at once, and multiples of a large odd number as random bits.
    for detector in 0..24 {
        let syndrome = (1u32 << detector).to_le_bytes();
        assert!(decoder.decode(&syndrome[..3]) <= 1);
    }
    for step in 0..5000u32 {
        let syndrome = step.wrapping_mul(0x9e37_79b9).to_be_bytes();
        assert!(decoder.decode(&syndrome[..3]) <= 1);
    }
    assert!(decoder.decode(&[0xff; 3]) <= 1);
    assert_eq!(decoder.decode(set.shot(0)), first);
}

#[test]
fn names_what_is_wrong_with_a_data_set() {
    let error = |dir: &Path, distance| match Dataset::load(dir, distance) {
        Ok(_) => panic!("the data set is not valid"),
        Err(error) => error.to_string(),
    };
    assert!(error(&data(), 4).ends_with("index.json: no code of distance 4"));

    let dir = std::env::temp_dir().join(format!("decode_demo_tests_{}", std::process::id()));
    fs::create_dir(&dir).expect("the folder is new");
    assert!(error(&dir, 3).contains("index.json: "));
    let write = |name: &str, content: &str| fs::write(dir.join(name), content).expect("writable");
    let write_index = |observables: u32, bytes: usize, shots: usize| {
        let index = format!(
            r#"[{{"name": "a", "distance": 3, "rounds": 1, "shots": {shots}, "detectors": 9,
                "bytes_per_shot": {bytes}, "observables": {observables}, "raw_flips": 0,
                "pymatching_logical_errors": 0}}]"#
        );
        write("index.json", &index);
    };
    write("index.json", "[{}]");
    assert!(error(&dir, 3).contains("missing field `name`"));
    write_index(2, 2, 1);
    assert!(error(&dir, 3).ends_with("index.json: 2 observables instead of 1"));
    write_index(1, 3, 1);
    assert!(error(&dir, 3).ends_with("3 bytes a shot do not fit 9 detectors"));
    write_index(1, 2, 2);
    assert!(error(&dir, 3).contains("a.dem: "));
    write("a.dem", "error(0.1) D8\n");
    write("a.dets.b8", "abc");
    assert!(error(&dir, 3).ends_with("a.dets.b8: 3 bytes instead of 2 shots of 2 bytes"));
    write("a.dets.b8", "abcd");
    write("a.obs.b8", "\u{0}\u{1}");
    write("a.pymatching.b8", "\u{1}\u{0}");
    let set = Dataset::load(&dir, 3).expect("the data set is complete");
    assert_eq!((set.shot(0), set.shot(1)), (&b"ab"[..], &b"cd"[..]));
    assert_eq!((set.observable(0), set.observable(1)), (false, true));
    assert_eq!((set.pymatching(0), set.pymatching(1)), (true, false));
    write_index(1, 2, usize::MAX);
    assert!(error(&dir, 3).contains("a.dets.b8: 4 bytes instead of"));
    fs::remove_dir_all(&dir).expect("the folder is ours");
}
