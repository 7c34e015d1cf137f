//! Arguments in, one line of JSON out.

/// The numbers on the command line, of which there must be so many.
pub(crate) fn numbers<const N: usize>() -> [usize; N] {
    let given: Vec<_> = std::env::args().skip_while(|argument| argument.parse::<usize>().is_err()).collect();
    let numbers: Option<Vec<usize>> = given.iter().map(|argument| argument.parse().ok()).collect();
    numbers.and_then(|numbers| numbers.try_into().ok()).unwrap_or_else(|| {
        eprintln!("{N} whole numbers are needed: see the head of the source file");
        std::process::exit(2);
    })
}

/// Median, least and mean of samples in nanoseconds.
pub(crate) fn print(mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    println!("{{\"p50_ns\":{:.1},\"min_ns\":{:.1},\"mean_ns\":{mean:.1}}}", samples[samples.len() / 2], samples[0]);
}
