//! Reader of stim's detector error model files.

use std::fmt;

/// Most detectors a model may name; a mistyped index must not allocate the whole memory.
const MAX_DETECTORS: usize = 1 << 20;

/// Most observables a model may name, so that a set of them fits the bits of a `u64`.
const MAX_OBSERVABLES: usize = u64::BITS as usize;

/// Why a detector error model could not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelError {
    /// Line of the model the error is about, counted from one; `None` if it is about the whole.
    pub(crate) line: Option<usize>,
    /// What is wrong.
    pub(crate) reason: String,
}

impl fmt::Display for ModelError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(formatter, "line {line}: {}", self.reason),
            None => formatter.write_str(&self.reason),
        }
    }
}

impl std::error::Error for ModelError {}

/// One independent symptom of an error mechanism: a part between `^` separators.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Component {
    /// Detectors it flips, as absolute indices.
    pub(crate) detectors: Vec<usize>,
    /// Observables it flips; bit `k` stands for `Lk`.
    pub(crate) observables: u64,
}

/// One `error(p) …` instruction.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mechanism {
    /// Line of the model, counted from one.
    pub(crate) line: usize,
    /// Probability that the mechanism occurs in a shot, 0 to 1.
    pub(crate) probability: f64,
    /// What it flips, split at the `^` separators.
    pub(crate) components: Vec<Component>,
}

/// A parsed detector error model: stim's `.dem` file format, with its loops already flattened.
///
/// Format: <https://github.com/quantumlib/Stim/blob/main/doc/file_format_dem_detector_error_model.md>
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct DetectorErrorModel {
    /// Number of detectors, hence of bits in a syndrome: the highest index named, plus one.
    pub(crate) detectors: usize,
    /// The error instructions in file order.
    pub(crate) mechanisms: Vec<Mechanism>,
}

impl DetectorErrorModel {
    /// Reads the text of a `.dem` file.
    ///
    /// # Errors
    ///
    /// Names the first line that is not a valid instruction. `repeat` blocks are refused: stim
    /// writes a model without them when asked for `flatten_loops`.
    pub(crate) fn parse(text: &str) -> Result<Self, ModelError> {
        let mut model = Self::default();
        let mut shift = 0;
        for (line, content) in (1..).zip(text.lines()) {
            model.parse_line(line, content, &mut shift).map_err(|reason| ModelError { line: Some(line), reason })?;
        }
        Ok(model)
    }

    /// Adds one line to the model; `shift` is the sum of the detector shifts so far.
    fn parse_line(&mut self, line: usize, content: &str, shift: &mut usize) -> Result<(), String> {
        let content = content.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            return Ok(());
        }
        let (name, arguments, targets) = split_instruction(content)?;
        match name.to_ascii_lowercase().as_str() {
            "error" => {
                let &[probability] = arguments.as_slice() else {
                    return Err("error needs exactly one probability".to_owned());
                };
                if !(0.0..=1.0).contains(&probability) {
                    return Err(format!("probability {probability} is not between 0 and 1"));
                }
                let components = self.parse_components(targets, *shift)?;
                self.mechanisms.push(Mechanism { line, probability, components });
            }
            "detector" => {
                for target in targets.split_whitespace() {
                    self.parse_detector(target, *shift)?;
                }
            }
            "logical_observable" => {
                for target in targets.split_whitespace() {
                    parse_observable(target)?;
                }
            }
            "shift_detectors" => {
                let by = parse_index(targets).ok_or_else(|| format!("'{targets}' is not a number of detectors"))?;
                *shift = shift
                    .checked_add(by)
                    .filter(|&sum| sum < MAX_DETECTORS)
                    .ok_or_else(|| format!("detectors shifted beyond {MAX_DETECTORS}"))?;
            }
            "repeat" => {
                return Err("repeat blocks are not supported, flatten the loops".to_owned());
            }
            _ => return Err(format!("unknown instruction '{name}'")),
        }
        Ok(())
    }

    /// Reads the targets of an error instruction, split at the `^` separators.
    fn parse_components(&mut self, targets: &str, shift: usize) -> Result<Vec<Component>, String> {
        let mut components = vec![Component::default()];
        let mut is_last_empty = true;
        for target in targets.split_whitespace() {
            let component = match components.last_mut() {
                Some(component) if target != "^" => component,
                _ if is_last_empty => return Err("no target before '^'".to_owned()),
                _ => {
                    components.push(Component::default());
                    is_last_empty = true;
                    continue;
                }
            };
            is_last_empty = false;
            if target.starts_with('L') {
                component.observables ^= 1 << parse_observable(target)?;
                continue;
            }
            let detector = self.parse_detector(target, shift)?;
            // Flips add modulo two, so a detector named twice is not flipped.
            match component.detectors.iter().position(|&d| d == detector) {
                Some(position) => drop(component.detectors.swap_remove(position)),
                None => component.detectors.push(detector),
            }
        }
        if is_last_empty && components.len() > 1 {
            return Err("no target after '^'".to_owned());
        }
        Ok(components)
    }

    /// Reads a target such as `D5` and returns its absolute index.
    fn parse_detector(&mut self, target: &str, shift: usize) -> Result<usize, String> {
        let detector = target
            .strip_prefix('D')
            .and_then(parse_index)
            .ok_or_else(|| format!("'{target}' is not a detector"))?
            .saturating_add(shift);
        if detector >= MAX_DETECTORS {
            return Err(format!("detector {detector} is beyond the limit of {MAX_DETECTORS} detectors"));
        }
        self.detectors = self.detectors.max(detector + 1);
        Ok(detector)
    }
}

/// Splits `name(argument, …) targets` into its three parts.
fn split_instruction(content: &str) -> Result<(&str, Vec<f64>, &str), String> {
    let end = content.find(|c: char| c == '(' || c.is_whitespace()).unwrap_or(content.len());
    let (name, rest) = content.split_at(end);
    let Some(rest) = rest.strip_prefix('(') else {
        return Ok((name, Vec::new(), rest.trim()));
    };
    let (list, targets) = rest.split_once(')').ok_or_else(|| "missing ')'".to_owned())?;
    let arguments = list
        .split(',')
        .map(|argument| {
            let argument = argument.trim();
            argument.parse().map_err(|_| format!("'{argument}' is not a number"))
        })
        .collect::<Result<_, _>>()?;
    Ok((name, arguments, targets.trim()))
}

/// Reads an observable such as `L0` and returns its index.
fn parse_observable(target: &str) -> Result<usize, String> {
    let observable =
        target.strip_prefix('L').and_then(parse_index).ok_or_else(|| format!("'{target}' is not an observable"))?;
    if observable < MAX_OBSERVABLES {
        Ok(observable)
    } else {
        Err(format!("observable {observable} is beyond the limit of {MAX_OBSERVABLES} observables"))
    }
}

/// Reads a plain decimal index; `str::parse` alone would also take a leading `+`.
fn parse_index(digits: &str) -> Option<usize> {
    let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn component(detectors: &[usize], observables: u64) -> Component {
        Component { detectors: detectors.to_vec(), observables }
    }

    fn message(text: &str) -> String {
        DetectorErrorModel::parse(text).expect_err("the model is invalid").to_string()
    }

    #[test]
    fn reads_every_instruction() {
        let text = "# a comment\n\
            \n\
            error(0.125) D0 D1 L0 ^ D2 # another one\n\
            \tERROR( 1e-3 ) D3 L1 L63\r\n\
            error(0)\n\
            detector(1, 2.5, -3) D0 D4\n\
            detector D1\n\
            logical_observable L0\n\
            shift_detectors(0, 0, 1) 5\n\
            error(0.25) D1 D1 D2\n\
            shift_detectors 2\n\
            detector D2\n";
        let model = DetectorErrorModel::parse(text).expect("the model is valid");
        assert_eq!(model.detectors, 10);
        let mechanism = |line, probability, components| Mechanism { line, probability, components };
        let expected = vec![
            mechanism(3, 0.125, vec![component(&[0, 1], 1), component(&[2], 0)]),
            mechanism(4, 1e-3, vec![component(&[3], 1 << 63 | 2)]),
            mechanism(5, 0.0, vec![component(&[], 0)]),
            mechanism(10, 0.25, vec![component(&[7], 0)]),
        ];
        assert_eq!(model.mechanisms, expected);
    }

    #[test]
    fn an_empty_text_is_an_empty_model() {
        let model = DetectorErrorModel::parse("\n  \n# nothing\n");
        assert_eq!(model, Ok(DetectorErrorModel::default()));
    }

    #[test]
    fn refuses_bad_lines_with_a_reason() {
        for (line, reason) in [
            ("error D0", "error needs exactly one probability"),
            ("error(0.1, 0.2) D0", "error needs exactly one probability"),
            ("error() D0", "'' is not a number"),
            ("error(0.1 D0", "missing ')'"),
            ("error(x) D0", "'x' is not a number"),
            ("error(1.5) D0", "probability 1.5 is not between 0 and 1"),
            ("error(-0.1) D0", "probability -0.1 is not between 0 and 1"),
            ("error(nan) D0", "probability NaN is not between 0 and 1"),
            ("error(0.1) ^ D0", "no target before '^'"),
            ("error(0.1) D0 ^ ^ D1", "no target before '^'"),
            ("error(0.1) D0 ^", "no target after '^'"),
            ("error(0.1) D0^D1", "'D0^D1' is not a detector"),
            ("error(0.1) 5", "'5' is not a detector"),
            ("error(0.1) D+5", "'D+5' is not a detector"),
            ("error(0.1) D-1", "'D-1' is not a detector"),
            ("error(0.1) D", "'D' is not a detector"),
            ("error(0.1) L", "'L' is not an observable"),
            ("error(0.1) D1048576", "detector 1048576 is beyond the limit of 1048576 detectors"),
            ("error(0.1) L64", "observable 64 is beyond the limit of 64 observables"),
            ("detector(0, a) D0", "'a' is not a number"),
            ("detector(0) L0", "'L0' is not a detector"),
            ("logical_observable D0", "'D0' is not an observable"),
            ("shift_detectors(0) D1", "'D1' is not a number of detectors"),
            ("shift_detectors", "'' is not a number of detectors"),
            ("shift_detectors 1048576", "detectors shifted beyond 1048576"),
            ("repeat 3 {", "repeat blocks are not supported, flatten the loops"),
            ("}", "unknown instruction '}'"),
            ("error[tag](0.1) D0", "unknown instruction 'error[tag]'"),
        ] {
            let text = format!("error(0.1) D0\n\n{line}\nerror(0.1) D1\n");
            assert_eq!(message(&text), format!("line 3: {reason}"), "{line}");
        }
    }

    #[test]
    fn a_shift_cannot_carry_a_detector_beyond_the_limit() {
        let text = "shift_detectors 1048575\nerror(0.1) D0\nerror(0.1) D18446744073709551615\n";
        assert!(message(text).starts_with("line 3: detector 18446744073709551615 is beyond"));
    }
}
