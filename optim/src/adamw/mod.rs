//! `AdamW`: Adam with bias correction and decoupled weight decay (Loshchilov and Hutter), with the arithmetic of
//! `torch.optim.AdamW`.
//!
//! An update is one pass over memory. It reads gradient, weight and moments, and writes weight, moments and the
//! 16-bit copy. Bytes read and written per element:
//!
//! | weights | moments | with a 16-bit gradient | with an `f32` gradient |
//! |---|---|---|---|
//! | `f32` | `f32` | 26 | 28 |
//! | `f32` master and 16-bit copy | `f32` | 28 | 30 |
//! | `bf16` | `f32` | 22 | 24 |
//! | `bf16` | `bf16` | 14 | 16 |
//! | `bf16` with Kahan compensation | `f32`, `bf16` | 26, 18 | 28, 20 |
//! | any | 8 bits, see [`has_blocks`] | 12 less than with `f32` | 12 less than with `f32` |
//!
//! Arithmetic is `f32` without fused multiply-add. So every SIMD path, split and thread count gives the same bits.

mod blockwise;
mod codec;
mod storage;
mod update;
pub(crate) mod windows;

use half::{f16, slice::HalfFloatSliceExt};
use kernels::{Form, Scalars};
use serde::{Deserialize, Serialize};

use crate::OptimError;
use crate::lanes::Simd;
use crate::optimizer::{
    GradChunk, Optimizer, Precision, StateChunk, StateSlot, StepArgs, WeightChunk,
};
use crate::rng::RandomStream;
use blockwise::BlockUpdate;
pub(crate) use blockwise::Blocks;
use update::{Rounding, Update};
use windows::{Compensated, Master, Narrow, Number, Weights};

pub use blockwise::{BLOCK_ELEMS, LEAST_ELEMS, has_blocks};
pub use storage::{Bf16Storage, MomentDtype, PureBf16};

/// Elements that are converted to `f16` at a time, while they are in the L1 cache.
const CAST_ELEMS: usize = 1024;

/// Constants of one AdamW update, computed in `f64` and rounded once to `f32`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Coefficients {
    /// Factor by which every gradient is multiplied before the update.
    pub grad_scale: f32,
    /// `beta1`, the weight of the old first moment.
    pub beta1: f32,
    /// `1 - beta1`, the weight of the new gradient in the first moment.
    pub one_minus_beta1: f32,
    /// `beta2`, the weight of the old second moment.
    pub beta2: f32,
    /// `1 - beta2`, the weight of the new squared gradient in the second moment.
    pub one_minus_beta2: f32,
    /// Constant added to the square root of the second moment: `eps * sqrt(1 - beta2^step)`.
    pub eps: f32,
    /// `lr * sqrt(1 - beta2^step) / (1 - beta1^step)`: the learning rate with both bias corrections.
    pub step_size: f32,
    /// `1 - lr * weight_decay`, the factor by which the weight is multiplied.
    pub decay: f32,
}

/// AdamW update rule with the hyper-parameters of a whole run. Learning rate and weight decay are arguments
/// of each step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW {
    /// Decay rate of the first moment (the moving average of the gradient).
    pub beta1: f64,
    /// Decay rate of the second moment (the moving average of the squared gradient).
    pub beta2: f64,
    /// Constant added to the square root of the bias-corrected second moment, by which the update is divided.
    pub eps: f64,
    /// Storage of weights and moments in pure `bf16` precision, which has no master weights.
    #[serde(default)]
    pub pure_bf16: PureBf16,
    /// Whether moments have 8 bits in blocks of [`BLOCK_ELEMS`] elements, except where [`has_blocks`] is false. The
    /// element type of `pure_bf16` is unused then: those moments are `f32`.
    #[serde(default)]
    pub eight_bit: bool,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            pure_bf16: PureBf16::default(),
            eight_bit: false,
        }
    }
}

impl AdamW {
    /// Creates an AdamW rule with default storage for pure `bf16`. Betas must be in `0..1`; `eps` must be
    /// finite and not negative.
    ///
    /// # Errors
    /// [`OptimError::OutOfRange`] with the name of the number that is out of range.
    pub fn new(beta1: f64, beta2: f64, eps: f64) -> Result<Self, OptimError> {
        for (what, value) in [("beta1", beta1), ("beta2", beta2)] {
            if !(0.0..1.0).contains(&value) {
                return Err(OptimError::OutOfRange {
                    what,
                    expected: "in 0..1",
                    got: value,
                });
            }
        }
        if !(eps.is_finite() && eps >= 0.0) {
            let expected = "finite and not negative";
            return Err(OptimError::OutOfRange {
                what: "epsilon",
                expected,
                got: eps,
            });
        }
        Ok(Self {
            beta1,
            beta2,
            eps,
            pure_bf16: PureBf16::default(),
            eight_bit: false,
        })
    }

    /// Constants of optimizer update number `step`, counted from 1. `grad_scale` is the factor by which every
    /// gradient is multiplied.
    ///
    /// # Errors
    /// [`OptimError::StepZero`] for step 0.
    pub fn coefficients(
        &self,
        step: u64,
        lr: f32,
        weight_decay: f32,
        grad_scale: f32,
    ) -> Result<Coefficients, OptimError> {
        if step == 0 {
            return Err(OptimError::StepZero);
        }
        let exponent = step as f64;
        let bias_correction1 = 1.0 - self.beta1.powf(exponent);
        let bias_correction2 = 1.0 - self.beta2.powf(exponent);
        let correction = bias_correction2.sqrt();
        let lr = f64::from(lr);
        Ok(Coefficients {
            grad_scale,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            eps: (self.eps * correction) as f32,
            step_size: (lr * correction / bias_correction1) as f32,
            decay: (1.0 - lr * f64::from(weight_decay)) as f32,
        })
    }

    /// Random stream from which AdamW takes the keys of stochastic rounding. Elements `2k` and `2k + 1` share
    /// three words: word 0 rounds their weights, word 1 their first moments, word 2 their second moments; see
    /// [`crate::rounding`].
    #[must_use]
    pub fn rounding_stream(seed: u64) -> RandomStream {
        RandomStream::new(seed, "optimizer rounding")
    }

    /// Constants of optimizer update number `step`, counted from 1, as a GPU kernel reads them. The kernel
    /// multiplies `grad_scale` by the clip factor that a norm kernel wrote to device memory, if it gets one.
    ///
    /// # Errors
    /// [`OptimError::StepZero`] for step 0.
    pub fn scalars(
        &self,
        step: u64,
        lr: f32,
        weight_decay: f32,
        grad_scale: f32,
        seed: u64,
    ) -> Result<Scalars, OptimError> {
        let c = self.coefficients(step, lr, weight_decay, grad_scale)?;
        Ok(Scalars {
            grad_scale: c.grad_scale,
            beta1: c.beta1,
            one_minus_beta1: c.one_minus_beta1,
            beta2: c.beta2,
            one_minus_beta2: c.one_minus_beta2,
            eps: c.eps,
            step_size: c.step_size,
            decay: c.decay,
            key: Self::rounding_stream(seed).key(),
            step: [step as u32, (step >> 32) as u32],
        })
    }

    fn step_on(&self, simd: Simd, mut args: StepArgs<'_>) -> Result<(), OptimError> {
        self.check_lengths(&args)?;
        let coefficients =
            self.coefficients(args.step, args.lr, args.weight_decay, args.grad_scale)?;
        let rounding = Rounding {
            stream: Self::rounding_stream(args.seed),
            step: args.step,
            first_element: args.first_element,
        };
        let work = Work {
            simd,
            coefficients,
            rounding,
        };
        let fits = match args.grad {
            GradChunk::F32(grad) => self.weights(work, grad, args.weight, &mut args.state),
            GradChunk::Bf16(grad) => self.weights(work, grad, args.weight, &mut args.state),
        };
        fits.map_err(|weight| OptimError::UnsupportedWindows {
            optimizer: self.name(),
            weight,
            expected: "two moments in f32 or in blocks of 8 bits, or for pure bf16 weights two in bf16 or f32 and, with Kahan \
                       compensation, a third window in bf16",
        })
    }

    /// Dispatches on the kind of weights. The error is the kind of weights that the state slots do not match.
    fn weights<G: Number>(
        &self,
        work: Work,
        grad: &[G],
        weight: WeightChunk<'_>,
        state: &mut [StateChunk<'_>],
    ) -> Result<(), &'static str> {
        let kind = weight.kind();
        if let [
            StateChunk::Blockwise { .. },
            StateChunk::Blockwise { .. },
            ..,
        ] = state
        {
            return match self.blocks(work, grad, weight, state) {
                true => Ok(()),
                false => Err(kind),
            };
        }
        let done = match (weight, self.pure_bf16.weights, state) {
            (WeightChunk::F32(weight), _, [StateChunk::F32(m), StateChunk::F32(v)]) => {
                work.run(grad, weight, m, v);
                true
            }
            (
                WeightChunk::Mixed { master, weight },
                _,
                [StateChunk::F32(m), StateChunk::F32(v)],
            ) => {
                work.run(grad, Master { master, weight }, m, v);
                true
            }
            (
                WeightChunk::MixedF16 { master, weight },
                _,
                [StateChunk::F32(m), StateChunk::F32(v)],
            ) => {
                work.run_f16(grad, master, weight, m, v);
                true
            }
            (WeightChunk::PureBf16(weight), Bf16Storage::Stochastic, [m, v]) => {
                work.moments(grad, Narrow::<false>(weight), m, v)
            }
            (WeightChunk::PureBf16(weight), Bf16Storage::Nearest, [m, v]) => {
                work.moments(grad, Narrow::<true>(weight), m, v)
            }
            (
                WeightChunk::PureBf16(weight),
                Bf16Storage::Kahan,
                [m, v, StateChunk::Bf16(error)],
            ) => work.moments(grad, Compensated { weight, error }, m, v),
            _ => false,
        };
        if done { Ok(()) } else { Err(kind) }
    }

    /// Updates a chunk whose moments have 8 bits. Returns false if the further states do not match the weights.
    fn blocks<G: Number>(
        &self,
        work: Work,
        grad: &[G],
        weight: WeightChunk<'_>,
        state: &mut [StateChunk<'_>],
    ) -> bool {
        let [m, v, rest @ ..] = state else {
            return false;
        };
        let (Some(m), Some(v)) = (m.blocks(), v.blocks()) else {
            return false;
        };
        match (weight, self.pure_bf16.weights, rest) {
            (WeightChunk::F32(weight), _, []) => {
                work.blocks(grad, weight, m, v).spread(work.simd);
            }
            (WeightChunk::Mixed { master, weight }, _, []) => {
                let weights = Master { master, weight };
                work.blocks(grad, weights, m, v).spread(work.simd);
            }
            (WeightChunk::MixedF16 { master, weight }, _, []) => {
                let update = work.blocks(grad, master, m, v);
                update.spread_f16(weight, work.simd);
            }
            (WeightChunk::PureBf16(weight), Bf16Storage::Stochastic, []) => {
                let weights = Narrow::<false>(weight);
                work.blocks(grad, weights, m, v).spread(work.simd);
            }
            (WeightChunk::PureBf16(weight), Bf16Storage::Nearest, []) => {
                let weights = Narrow::<true>(weight);
                work.blocks(grad, weights, m, v).spread(work.simd);
            }
            (WeightChunk::PureBf16(weight), Bf16Storage::Kahan, [StateChunk::Bf16(error)]) => {
                let weights = Compensated { weight, error };
                work.blocks(grad, weights, m, v).spread(work.simd);
            }
            _ => return false,
        }
        true
    }

    fn check_lengths(&self, args: &StepArgs<'_>) -> Result<(), OptimError> {
        let expected = args.grad.len();
        let check = |window, got| {
            if got == expected {
                Ok(())
            } else {
                Err(OptimError::LengthMismatch {
                    window,
                    expected,
                    got,
                })
            }
        };
        match &args.weight {
            WeightChunk::F32(weight) => check("weight", weight.len())?,
            WeightChunk::PureBf16(weight) => check("weight", weight.len())?,
            WeightChunk::Mixed { master, weight } => {
                check("master", master.len())?;
                check("weight", weight.len())?;
            }
            WeightChunk::MixedF16 { master, weight } => {
                check("master", master.len())?;
                check("weight", weight.len())?;
            }
        }
        for (name, window) in storage::NAMES.into_iter().zip(&args.state) {
            check(name, window.len())?;
            if let StateChunk::Blockwise { absmax, .. } = window
                && absmax.len() != expected.div_ceil(BLOCK_ELEMS)
            {
                return Err(OptimError::LengthMismatch {
                    window: "absmax",
                    expected: expected.div_ceil(BLOCK_ELEMS),
                    got: absmax.len(),
                });
            }
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn slots(&self, precision: Precision) -> &'static [StateSlot] {
        match self.eight_bit {
            true => self.pure_bf16.block_slots(precision),
            false => self.pure_bf16.slots(precision),
        }
    }

    fn on_device(&self, precision: Precision) -> Option<(&AdamW, Form)> {
        let form = match (precision, self.pure_bf16.weights, self.pure_bf16.moments) {
            (Precision::F32, ..) if self.eight_bit => Form::F32Blocks,
            (Precision::Bf16, ..) if self.eight_bit => Form::MasterBf16Blocks,
            (Precision::Fp16, ..) if self.eight_bit => Form::MasterF16Blocks,
            (Precision::PureBf16, Bf16Storage::Stochastic, _) if self.eight_bit => Form::Bf16Blocks,
            (Precision::F32, ..) => Form::F32,
            (Precision::Bf16, ..) => Form::MasterBf16,
            (Precision::Fp16, ..) => Form::MasterF16,
            (Precision::PureBf16, Bf16Storage::Stochastic, MomentDtype::Bf16) => Form::PureBf16,
            (Precision::PureBf16, Bf16Storage::Stochastic, MomentDtype::F32) => Form::Bf16,
            (Precision::PureBf16, Bf16Storage::Nearest | Bf16Storage::Kahan, _) => return None,
        };
        Some((self, form))
    }

    fn step(&self, args: StepArgs<'_>) -> Result<(), OptimError> {
        self.step_on(Simd::detect(), args)
    }
}

/// Arguments that every chunk of one update shares.
#[derive(Clone, Copy)]
struct Work {
    simd: Simd,
    coefficients: Coefficients,
    rounding: Rounding,
}

impl Work {
    fn run<G: Number, W: Weights, M: Number>(
        self,
        grad: &[G],
        weights: W,
        m: &mut [M],
        v: &mut [M],
    ) {
        let update = Update {
            coefficients: self.coefficients,
            rounding: self.rounding,
            grad,
            weights,
            m,
            v,
        };
        update.spread(self.simd);
    }

    /// Update of a chunk with moments of 8 bits.
    fn blocks<'a, G: Number, W: Weights>(
        self,
        grad: &'a [G],
        weights: W,
        m: Blocks<'a>,
        v: Blocks<'a>,
    ) -> BlockUpdate<'a, G, W> {
        let c = self.coefficients;
        BlockUpdate {
            // As the kernel computes them, in f32.
            coefficients: Coefficients {
                one_minus_beta1: 1.0 - c.beta1,
                one_minus_beta2: 1.0 - c.beta2,
                ..c
            },
            rounding: self.rounding,
            grad,
            weights,
            m,
            v,
        }
    }

    /// Dispatches on the element type of the moments. Returns false when the two moments differ in type.
    fn moments<G: Number, W: Weights>(
        self,
        grad: &[G],
        weights: W,
        m: &mut StateChunk<'_>,
        v: &mut StateChunk<'_>,
    ) -> bool {
        match (m, v) {
            (StateChunk::F32(m), StateChunk::F32(v)) => self.run(grad, weights, m, v),
            (StateChunk::Bf16(m), StateChunk::Bf16(v)) => self.run(grad, weights, m, v),
            _ => return false,
        }
        true
    }

    /// Updates the `f32` master weights piece by piece and converts each piece to `f16` while it is in cache.
    fn run_f16<G: Number>(
        self,
        grad: &[G],
        master: &mut [f32],
        weight: &mut [f16],
        m: &mut [f32],
        v: &mut [f32],
    ) {
        if grad.len() > CAST_ELEMS {
            let mid = (grad.len() / 2).next_multiple_of(CAST_ELEMS);
            let (grad, master) = (grad.split_at(mid), master.split_at_mut(mid));
            let (weight, m, v) = (
                weight.split_at_mut(mid),
                m.split_at_mut(mid),
                v.split_at_mut(mid),
            );
            let mut first = move || self.run_f16(grad.0, master.0, weight.0, m.0, v.0);
            let mut second = move || self.run_f16(grad.1, master.1, weight.1, m.1, v.1);
            if mid >= update::CHUNK_ELEMS {
                rayon::join(first, second);
            } else {
                first();
                second();
            }
        } else {
            self.run(grad, &mut *master, m, v);
            weight.convert_from_f32_slice(master);
        }
    }
}

#[cfg(test)]
mod blockwise_tests;
#[cfg(test)]
mod rounding_tests;
#[cfg(test)]
mod tests;
