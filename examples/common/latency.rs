//! Round-trip times: percentiles, and a picture in text.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Times in nanoseconds, counted with three significant digits.
pub(crate) struct Latency(Histogram<u64>);

/// What is reported of a distribution, in nanoseconds.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    min: u64,
    mean: f64,
    pub(crate) p50: u64,
    p90: u64,
    p99: u64,
    p999: u64,
    max: u64,
}

impl Latency {
    pub(crate) fn new() -> Self {
        // Up to a minute; what lasts longer counts as a minute.
        Self(Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("three digits are allowed"))
    }

    pub(crate) fn record(&mut self, nanoseconds: u64) {
        self.0.saturating_record(nanoseconds);
    }

    pub(crate) fn summary(&self) -> Summary {
        let at = |quantile| self.0.value_at_quantile(quantile);
        Summary {
            min: self.0.min(),
            mean: (self.0.mean() * 10.0).round() / 10.0,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: self.0.max(),
        }
    }

    /// The percentiles in one line.
    pub(crate) fn line(&self) -> String {
        let Summary { min, mean, p50, p90, p99, p999, max } = self.summary();
        format!(
            "min {}  mean {}  p50 {}  p90 {}  p99 {}  p99.9 {}  max {}",
            time(min),
            time(mean as u64),
            time(p50),
            time(p90),
            time(p99),
            time(p999),
            time(max)
        )
    }

    /// A histogram of a dozen rows. Each row begins half as high again as the one before, so that a long tail fits.
    pub(crate) fn picture(&self) -> String {
        const ROWS: usize = 14;
        const WIDTH: f64 = 50.0;
        if self.0.is_empty() {
            return "no samples\n".into();
        }
        // A few samples far below the others would push all of these into the last row.
        let first = self.0.value_at_quantile(0.001).max(1);
        let mut rows = [0_u64; ROWS];
        for value in self.0.iter_recorded() {
            let row = (value.value_iterated_to() as f64 / first as f64).max(1.0).log(1.5) as usize;
            rows[row.min(ROWS - 1)] += value.count_at_value();
        }
        let most = rows.iter().copied().max().unwrap_or(1).max(1);
        let mut text = String::new();
        let last = rows.iter().rposition(|count| *count > 0).unwrap_or(0);
        for (row, count) in rows.iter().enumerate().take(last + 1) {
            let from = first as f64 * 1.5_f64.powi(row as i32);
            let mut length = (*count as f64 / most as f64 * WIDTH).round() as usize;
            if *count > 0 {
                length = length.max(1);
            }
            let more = if row == ROWS - 1 { "+" } else { " " };
            text += &format!("{:>9}{more} {:<50} {count}\n", time(from as u64), "█".repeat(length));
        }
        text
    }
}

/// A time with the unit that suits it.
pub(crate) fn time(nanoseconds: u64) -> String {
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.2} µs", nanoseconds as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", nanoseconds as f64 / 1e6),
        _ => format!("{:.2} s", nanoseconds as f64 / 1e9),
    }
}
