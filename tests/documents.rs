//! What the documents say of the tests is true.

use std::collections::BTreeSet;
use std::path::Path;

/// Every kind of fault that `docs/faults.md` has to have a row for.
const KINDS: &str = "A1 A2 A3 A4 A5 A6 A7 A8 A10 A11 B1 B2 B3 B4 C1 C2 C3 C4 C6 C7 C8 D1 D2 D3 D4 D5 D6 E1 E2 E4 E5 E6 \
                     E7 E9 E10 F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 G1 G2 G3 G4 G5 H1 H2 H3 H4 H5 I1 I2 J1 J2 K1 K2 L1 L2 L3 \
                     M1 M2 M3 M4";

fn read(path: &str) -> String {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&whole).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Names of the test functions in a source: those that `#[test]` stands before, with or without other attributes between.
fn tests_in(source: &str) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let mut marked = false;
    for line in source.lines().map(str::trim) {
        if line == "#[test]" {
            marked = true;
        } else if let Some(rest) = line.strip_prefix("fn ").filter(|_| marked) {
            names.extend(rest.split('(').next());
            marked = false;
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            marked = false;
        }
    }
    names
}

/// Names of the suite's tests, which `conformance!` instantiates: those in the macro's own list.
fn suite() -> BTreeSet<String> {
    let source = read("tests/support/conformance.rs");
    let list =
        source.split("$crate::conformance!($setup;").nth(1).expect("the suite's list").split(')').next().unwrap();
    list.split(',').map(|name| name.trim().to_owned()).collect()
}

fn exists(path: &str, name: &str) -> bool {
    if path.starts_with("tests/support/conformance") {
        return suite().contains(name) && read(path).contains(&format!("pub(crate) fn {name}("));
    }
    tests_in(&read(path)).contains(name)
}

#[test]
fn every_fault_has_a_test_that_exists_or_a_reason() {
    let document = read("docs/faults.md");
    let mut kinds = Vec::new();
    for row in document.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|')) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 4, "{row}");
        let [kind, fault, done, tests] = cells[..] else { unreachable!() };
        if kind == "id" || kind.starts_with("---") {
            continue;
        }
        kinds.push(kind.to_owned());
        assert!(!fault.is_empty() && !done.is_empty(), "{kind} says nothing");
        let named: Vec<_> = tests.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        assert!(!named.is_empty() || done.starts_with("does not apply"), "{kind} has neither a test nor a reason");
        for name in named {
            let inner = name.strip_prefix('`').and_then(|name| name.strip_suffix('`'));
            let (path, function) =
                inner.and_then(|name| name.split_once("::")).unwrap_or_else(|| panic!("{kind}: {name}"));
            assert!(exists(path, function), "{kind}: there is no test {path}::{function}");
        }
    }
    assert_eq!(kinds, KINDS.split_whitespace().collect::<Vec<_>>(), "rows are missing, double or out of order");
}

/// The check above is able to fail.
#[test]
fn what_is_no_test_is_not_taken_for_one() {
    assert!(exists("tests/documents.rs", "what_is_no_test_is_not_taken_for_one"));
    assert!(!exists("tests/documents.rs", "tests_in"));
    assert!(!exists("tests/support/conformance.rs", "running"));
    assert!(exists("tests/support/conformance.rs", "many_rounds"));
    assert!(exists("src/ring/tests.rs", "any_bytes_are_survived"));
}
