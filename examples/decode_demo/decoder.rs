//! Minimum-weight perfect matching decoder for graph-like detector error models.
//!
//! A [`DetectorErrorModel`] becomes a weighted [`MatchingGraph`], on which fusion-blossom finds the
//! likeliest errors that explain a shot's detection events ([`MatchingDecoder`]).

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use fusion_blossom::mwpm_solver::{PrimalDualSolver, SolverSerial};
use fusion_blossom::util::{SolverInitializer, SyndromePattern, Weight};

use super::model::{DetectorErrorModel, ModelError};

/// Integer units given to the lightest edge.
///
/// Rounding to an even integer is off by at most one unit, so no weight is off by more than 0.05 %.
const LIGHTEST_EDGE_UNITS: f64 = 2000.0;

/// An error that flips one detector (and is matched to the boundary) or two.
#[derive(Debug, Clone, PartialEq)]
struct Edge {
    /// The detector with the lower index.
    first: usize,
    /// The other detector, or `None` for the boundary.
    second: Option<usize>,
    /// Probability that the edge is flipped in a shot, below one half.
    probability: f64,
    /// Observables that flip with it; bit `k` stands for `Lk`.
    observables: u64,
    /// Weight as the solver takes it: proportional to [`Edge::weight`], even.
    units: Weight,
}

impl Edge {
    /// Log-likelihood ratio ln((1 − p) / p): the lightest matching is the likeliest set of errors.
    ///
    /// See Dennis et al., "Topological quantum memory", <https://arxiv.org/abs/quant-ph/0110143>.
    fn weight(&self) -> f64 {
        ((1.0 - self.probability) / self.probability).ln()
    }
}

/// Detectors joined by the errors that flip them, at most one edge for a pair of end points.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MatchingGraph {
    /// Number of detectors.
    detectors: usize,
    /// The edges, in the order the model first names them.
    edges: Vec<Edge>,
}

impl MatchingGraph {
    /// Makes every component with one or two detectors an edge and merges parallel edges.
    ///
    /// Parallel edges with the same observables are independent causes of the same flips, so the
    /// merged one is flipped if exactly one of them is: p = p₁(1 − p₂) + p₂(1 − p₁), as in
    /// PyMatching. With different observables the likelier edge is kept (PyMatching keeps the
    /// first edge's observables; such a code has distance two at most, no decoder does it well).
    ///
    /// # Errors
    ///
    /// Fails if a component has more than two detectors, a probability is one half or more, a
    /// detector cannot be reached from the boundary, or the weights are too far apart.
    pub(crate) fn from_model(model: &DetectorErrorModel) -> Result<Self, ModelError> {
        let mut edges: Vec<Edge> = Vec::new();
        let mut edge_between = HashMap::new();
        for mechanism in &model.mechanisms {
            let probability = mechanism.probability;
            let fail = |reason: String| ModelError { line: Some(mechanism.line), reason };
            if probability >= 0.5 {
                let reason = format!("probability {probability} gives no positive weight");
                return Err(fail(reason));
            }
            for component in &mechanism.components {
                let (first, second) = match *component.detectors.as_slice() {
                    // An error that no detector sees, or that never occurs, cannot be decoded.
                    [] => continue,
                    _ if probability == 0.0 => continue,
                    [only] => (only, None),
                    [one, other] => (one.min(other), Some(one.max(other))),
                    ref more => {
                        let reason = format!("{} detectors in one component", more.len());
                        return Err(fail(reason));
                    }
                };
                let edge = Edge { first, second, probability, observables: component.observables, units: 0 };
                match edge_between.entry((first, second)) {
                    Entry::Vacant(entry) => {
                        entry.insert(edges.len());
                        edges.push(edge);
                    }
                    Entry::Occupied(entry) => merge_parallel(&mut edges[*entry.get()], &edge),
                }
            }
        }
        let mut graph = Self { detectors: model.detectors, edges };
        graph.check_boundary()?;
        graph.scale_weights()?;
        Ok(graph)
    }

    /// Refuses detectors without a path to the boundary: alone, their events have no matching.
    fn check_boundary(&self) -> Result<(), ModelError> {
        let mut reached = vec![false; self.detectors];
        let mut has_changed = true;
        while has_changed {
            has_changed = false;
            for edge in &self.edges {
                let is_second_reached = edge.second.is_none_or(|second| reached[second]);
                if reached[edge.first] != is_second_reached {
                    reached[edge.first] = true;
                    edge.second.inspect(|&second| reached[second] = true);
                    has_changed = true;
                }
            }
        }
        match reached.iter().position(|&is_reached| !is_reached) {
            None => Ok(()),
            Some(detector) => {
                Err(ModelError { line: None, reason: format!("no errors join detector {detector} to the boundary") })
            }
        }
    }

    /// Sets the edges' integer weights.
    fn scale_weights(&mut self) -> Result<(), ModelError> {
        let weights = self.edges.iter().map(Edge::weight);
        let scale = LIGHTEST_EDGE_UNITS / weights.fold(f64::INFINITY, f64::min);
        // The solver adds weights along paths; no path visits more vertices than this.
        let vertices = self.detectors + self.edges.len();
        let limit = Weight::MAX as f64 / (vertices + 1) as f64;
        for edge in &mut self.edges {
            let units = edge.weight() * scale;
            if !(0.0..limit).contains(&units) {
                return Err(ModelError { line: None, reason: "the error probabilities are too far apart".to_owned() });
            }
            // The solver halves weights, as both ends of an edge grow at once: they must be even.
            edge.units = 2 * (units / 2.0).round() as Weight;
        }
        Ok(())
    }
}

/// Merges `other` into `edge`, which has the same end points; see [`MatchingGraph::from_model`].
fn merge_parallel(edge: &mut Edge, other: &Edge) {
    let (p, q) = (edge.probability, other.probability);
    if edge.observables == other.observables {
        edge.probability = p * (1.0 - q) + q * (1.0 - p);
    } else if q > p {
        edge.clone_from(other);
    }
}

/// Decodes shots one after the other; it can be moved to another thread.
pub(crate) struct MatchingDecoder {
    /// Serial fusion-blossom solver, cleared after each shot.
    solver: SolverSerial,
    /// Detection events of the current shot; kept to reuse its allocation.
    events: SyndromePattern,
    /// Observables that each edge flips, in the order of the solver's edges.
    observables: Vec<u64>,
    /// Number of detectors.
    detectors: usize,
}

impl MatchingDecoder {
    /// Prepares a solver for the graph.
    pub(crate) fn new(graph: &MatchingGraph) -> Self {
        // Every boundary edge gets a virtual vertex of its own: a shared one would let the
        // solver's path search cross the boundary and visit its many neighbours.
        let mut vertices = graph.detectors;
        let mut weighted_edges = Vec::with_capacity(graph.edges.len());
        for edge in &graph.edges {
            let second = edge.second.unwrap_or_else(|| {
                vertices += 1;
                vertices - 1
            });
            weighted_edges.push((edge.first, second, edge.units));
        }
        let virtual_vertices = (graph.detectors..vertices).collect();
        let initializer = SolverInitializer::new(vertices, weighted_edges, virtual_vertices);
        Self {
            solver: SolverSerial::new(&initializer),
            events: SyndromePattern::new_vertices(Vec::with_capacity(graph.detectors)),
            observables: graph.edges.iter().map(|edge| edge.observables).collect(),
            detectors: graph.detectors,
        }
    }

    /// Bytes of a syndrome: one bit for each detector, padded to a byte.
    pub(crate) fn syndrome_bytes(&self) -> usize {
        self.detectors.div_ceil(8)
    }

    /// Returns the observables that the likeliest errors flip; bit `k` stands for `Lk`.
    ///
    /// `syndrome` is a shot in stim's `b8` result format: bit `i % 8` of byte `i / 8`, counted from
    /// the least significant, is the event of detector `i`. Missing bytes count as no events and
    /// padding is ignored, so a caller who takes syndromes from outside should compare their
    /// length with [`MatchingDecoder::syndrome_bytes`].
    ///
    /// Format: <https://github.com/quantumlib/Stim/blob/main/doc/result_formats.md#b8>
    pub(crate) fn decode(&mut self, syndrome: &[u8]) -> u64 {
        let events = &mut self.events.defect_vertices;
        events.clear();
        for (index, &byte) in syndrome.iter().enumerate() {
            let mut rest = byte;
            while rest != 0 {
                let detector = index * 8 + rest.trailing_zeros() as usize;
                if detector < self.detectors {
                    events.push(detector);
                }
                rest &= rest - 1;
            }
        }
        if events.is_empty() {
            return 0;
        }
        self.solver.solve(&self.events);
        let flips = self.solver.subgraph().into_iter().fold(0, |flips, edge| flips ^ self.observables[edge]);
        self.solver.clear();
        flips
    }
}

// The decoder is built in one thread and used in another.
const _: () = {
    const fn assert_send<T: Send>() {}
    assert_send::<MatchingDecoder>();
};
