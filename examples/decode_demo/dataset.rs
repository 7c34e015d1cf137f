//! Sampled shots of a memory experiment and what is known about them.
//!
//! A data set is an entry of `index.json` and four files named after it: the detector error model
//! (`.dem`), the detection events (`.dets.b8`), the true observable flips (`.obs.b8`) and
//! PyMatching's predictions of them (`.pymatching.b8`). The `.b8` files are in stim's `b8` result
//! format: one bit each, least significant first, every shot padded to a byte.
//!
//! Format: <https://github.com/quantumlib/Stim/blob/main/doc/result_formats.md#b8>

use std::fmt;
use std::fs;
use std::path::Path;

use serde::Deserialize;

/// Why a data set could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DatasetError(String);

impl fmt::Display for DatasetError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for DatasetError {}

/// An entry of `index.json`; the fields that nothing here needs are left out.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Description {
    /// Name of the data set, and of its files without their extensions.
    pub(crate) name: String,
    /// Distance of the code.
    pub(crate) distance: u32,
    /// Number of shots.
    pub(crate) shots: usize,
    /// Number of detectors, hence of meaningful bits in a shot.
    pub(crate) detectors: usize,
    /// Bytes of a shot's detection events.
    pub(crate) bytes_per_shot: usize,
    /// Number of logical observables; only one is supported.
    pub(crate) observables: usize,
    /// Shots whose observable flipped: the logical errors if nothing is decoded.
    #[cfg(test)]
    pub(crate) raw_flips: usize,
    /// Shots whose observable flip PyMatching predicts wrongly.
    pub(crate) pymatching_logical_errors: usize,
}

/// A loaded data set.
#[derive(Debug, Clone)]
pub(crate) struct Dataset {
    /// Its entry of `index.json`.
    description: Description,
    /// Text of the detector error model.
    model: String,
    /// Detection events, shot after shot.
    detections: Vec<u8>,
    /// True observable flips, a byte a shot.
    observables: Vec<u8>,
    /// PyMatching's predicted observable flips, a byte a shot.
    predictions: Vec<u8>,
}

impl Dataset {
    /// Loads the first data set in the folder `dir` whose code has the given distance.
    ///
    /// # Errors
    ///
    /// Names the file that is missing, malformed or of another size than `index.json` says.
    pub(crate) fn load(dir: &Path, distance: u32) -> Result<Self, DatasetError> {
        let index_path = dir.join("index.json");
        let descriptions: Vec<Description> =
            serde_json::from_slice(&read(&index_path)?).map_err(|error| about(&index_path, error))?;
        let description = descriptions
            .into_iter()
            .find(|description| description.distance == distance)
            .ok_or_else(|| about(&index_path, format!("no code of distance {distance}")))?;
        if description.observables != 1 {
            let reason = format!("{} observables instead of 1", description.observables);
            return Err(about(&index_path, reason));
        }
        if description.bytes_per_shot != description.detectors.div_ceil(8) {
            let reason =
                format!("{} bytes a shot do not fit {} detectors", description.bytes_per_shot, description.detectors);
            return Err(about(&index_path, reason));
        }

        let path = |extension: &str| dir.join(format!("{}.{extension}", description.name));
        let shots = description.shots;
        let model_path = path("dem");
        let model = String::from_utf8(read(&model_path)?).map_err(|e| about(&model_path, e))?;
        let detections = read_shots(&path("dets.b8"), shots, description.bytes_per_shot)?;
        let observables = read_shots(&path("obs.b8"), shots, 1)?;
        let predictions = read_shots(&path("pymatching.b8"), shots, 1)?;
        Ok(Self { description, model, detections, observables, predictions })
    }

    /// What `index.json` says about the data set.
    pub(crate) fn description(&self) -> &Description {
        &self.description
    }

    /// Text of the detector error model.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// Detection events of a shot, verbatim: what a control system would send to the decoder.
    ///
    /// # Panics
    ///
    /// Panics if there is no such shot.
    pub(crate) fn shot(&self, index: usize) -> &[u8] {
        let size = self.description.bytes_per_shot;
        &self.detections[index * size..][..size]
    }

    /// Whether the observable really flipped in a shot.
    ///
    /// # Panics
    ///
    /// Panics if there is no such shot.
    pub(crate) fn observable(&self, index: usize) -> bool {
        self.observables[index] & 1 != 0
    }

    /// Whether PyMatching predicts that the observable flipped in a shot.
    ///
    /// # Panics
    ///
    /// Panics if there is no such shot.
    pub(crate) fn pymatching(&self, index: usize) -> bool {
        self.predictions[index] & 1 != 0
    }
}

/// Reads a whole file.
fn read(path: &Path) -> Result<Vec<u8>, DatasetError> {
    fs::read(path).map_err(|error| about(path, error))
}

/// Reads a file and checks that it holds `shots` records of `size` bytes.
fn read_shots(path: &Path, shots: usize, size: usize) -> Result<Vec<u8>, DatasetError> {
    let content = read(path)?;
    // A product that overflows cannot be the size of a file either.
    if shots.checked_mul(size) == Some(content.len()) {
        return Ok(content);
    }
    let reason = format!("{} bytes instead of {shots} shots of {size} bytes", content.len());
    Err(about(path, reason))
}

/// An error about a file.
fn about(path: &Path, reason: impl fmt::Display) -> DatasetError {
    DatasetError(format!("{}: {reason}", path.display()))
}
