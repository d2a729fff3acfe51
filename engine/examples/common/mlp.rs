//! A perceptron of two layers on plain vectors, and its training by an optimizer that nobody divides.

use optim::{AdamW, GradChunk, Optimizer, StateChunk, StepArgs, WeightChunk};
use std::error::Error;

/// Inputs, hidden values, outputs.
pub(crate) const SIZES: [usize; 3] = [5, 16, 3];
pub(crate) const LAYERS: usize = SIZES.len() - 1;
pub(crate) const STEPS: usize = 30;
/// Samples of a step over all ranks.
pub(crate) const SAMPLES: usize = 8;
pub(crate) const LR: f64 = 1e-2;
pub(crate) const WEIGHT_DECAY: f32 = 0.1;
/// Largest difference from the undivided optimizer that is accepted.
pub(crate) const TOLERANCE: f32 = 1e-6;

pub(crate) type Rows = Vec<Vec<f32>>;

/// A number in -1..1 that looks random.
fn number(seed: usize) -> f32 {
    (seed.wrapping_mul(2_654_435_761) >> 7 & 0xffff) as f32 / 32_768.0 - 1.0
}

/// Weight and bias of every layer, one after the other.
pub(crate) fn initial() -> Rows {
    let tensor = |elems: usize, scale: f32, seed: usize| {
        (0..elems).map(|i| scale * number(seed + i)).collect()
    };
    (0..LAYERS)
        .flat_map(|l| {
            let (inputs, outputs) = (SIZES[l], SIZES[l + 1]);
            [
                tensor(inputs * outputs, 0.4, 1000 * l),
                tensor(outputs, 0.1, 1000 * l + 500),
            ]
        })
        .collect()
}

/// Inputs and targets of the samples `range` of a step.
pub(crate) fn batch(step: usize, range: std::ops::Range<usize>) -> (Rows, Rows) {
    let row = |sample: usize, width: usize, part: usize| {
        let seed = 7919 * (step * SAMPLES + sample) + part;
        (0..width).map(|i| number(seed + i)).collect()
    };
    let inputs = range.clone().map(|s| row(s, SIZES[0], 0)).collect();
    (inputs, range.map(|s| row(s, SIZES[LAYERS], 100)).collect())
}

/// `W x + b`, through tanh except in the last layer.
pub(crate) fn forward(layer: usize, weight: &[f32], bias: &[f32], inputs: &Rows) -> Rows {
    let width = SIZES[layer];
    let one = |x: &Vec<f32>| {
        let sums = weight.chunks(width).zip(bias);
        let sums = sums.map(|(row, b)| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>() + b);
        match layer + 1 == LAYERS {
            true => sums.collect(),
            false => sums.map(f32::tanh).collect::<Vec<f32>>(),
        }
    };
    inputs.iter().map(one).collect()
}

/// Gradients of weight, bias and inputs of a layer, from those of its outputs.
pub(crate) fn backward(
    layer: usize,
    weight: &[f32],
    inputs: &Rows,
    outputs: &Rows,
    gradients: &Rows,
) -> (Vec<f32>, Vec<f32>, Rows) {
    let width = SIZES[layer];
    let (mut of_weight, mut of_bias) = (vec![0.0; weight.len()], vec![0.0; SIZES[layer + 1]]);
    let mut of_inputs = vec![vec![0.0; width]; inputs.len()];
    for (row, x) in inputs.iter().enumerate() {
        for o in 0..SIZES[layer + 1] {
            let slope = match layer + 1 == LAYERS {
                true => 1.0,
                false => 1.0 - outputs[row][o] * outputs[row][o],
            };
            let g = gradients[row][o] * slope;
            of_bias[o] += g;
            for i in 0..width {
                of_weight[o * width + i] += g * x[i];
                of_inputs[row][i] += g * weight[o * width + i];
            }
        }
    }
    (of_weight, of_bias, of_inputs)
}

/// Sum over samples of half the squared error, and its gradient.
pub(crate) fn loss(outputs: &Rows, targets: &Rows) -> (f64, Rows) {
    let rows = outputs.iter().zip(targets);
    let errors: Rows = rows
        .map(|(y, t)| y.iter().zip(t).map(|(y, t)| y - t).collect())
        .collect();
    let squares = errors.iter().flatten().map(|e| f64::from(e * e));
    (0.5 * squares.sum::<f64>(), errors)
}

/// Sum of the losses of a batch, and the gradients of that sum for all tensors.
pub(crate) fn gradients(weights: &Rows, (inputs, targets): &(Rows, Rows)) -> (f64, Rows) {
    let mut values = vec![inputs.clone()];
    for layer in 0..LAYERS {
        let [weight, bias] = [&weights[2 * layer], &weights[2 * layer + 1]];
        values.push(forward(layer, weight, bias, &values[layer]));
    }
    let (sum, mut flowing) = loss(&values[LAYERS], targets);
    let mut all = vec![Vec::new(); weights.len()];
    for layer in (0..LAYERS).rev() {
        let (of_weight, of_bias, of_inputs) = backward(
            layer,
            &weights[2 * layer],
            &values[layer],
            &values[layer + 1],
            &flowing,
        );
        all[2 * layer] = of_weight;
        all[2 * layer + 1] = of_bias;
        flowing = of_inputs;
    }
    (sum, all)
}

/// Weights after training in one process, whole batches and whole state.
pub(crate) fn undivided() -> Result<Rows, Box<dyn Error>> {
    let mut weights = initial();
    let zeros = || weights.iter().map(|w| vec![0.0; w.len()]).collect::<Rows>();
    let (mut first, mut second) = (zeros(), zeros());
    for step in 0..STEPS {
        let (_, gradients) = gradients(&weights, &batch(step, 0..SAMPLES));
        for (t, weight) in weights.iter_mut().enumerate() {
            AdamW::default().step(StepArgs {
                step: step as u64 + 1,
                lr: LR as f32,
                weight_decay: WEIGHT_DECAY,
                grad_scale: 1.0 / SAMPLES as f32,
                seed: 0,
                first_element: 0,
                grad: GradChunk::F32(&gradients[t]),
                weight: WeightChunk::F32(weight),
                state: vec![
                    StateChunk::F32(&mut first[t]),
                    StateChunk::F32(&mut second[t]),
                ],
            })?;
        }
    }
    Ok(weights)
}

/// Compares with [`undivided`]; rank 0 says the result.
///
/// # Errors
/// A difference above [`TOLERANCE`].
pub(crate) fn check(what: &str, rank: usize, weights: &Rows) -> Result<(), Box<dyn Error>> {
    let expected = undivided()?;
    let pairs = weights.iter().flatten().zip(expected.iter().flatten());
    let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    if rank == 0 {
        println!("{what}: largest difference from the undivided AdamW {difference:.1e}");
    }
    // A NaN is no small difference.
    if difference <= TOLERANCE && weights.iter().flatten().all(|w| w.is_finite()) {
        return Ok(());
    }
    Err(format!("{what}: {difference:e} is more than {TOLERANCE:e}").into())
}
