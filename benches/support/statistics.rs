//! Medians of short interleaved measurements.

#![allow(dead_code)] // each bench uses a part of it

/// The middle of some figures.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The least of some figures.
pub(crate) fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// The distance between the quartiles as a part of the median.
pub(crate) fn spread(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    (sorted[sorted.len() * 3 / 4] - sorted[sorted.len() / 4]) / sorted[sorted.len() / 2]
}
