//! `AdamW`: Adam with bias correction and decoupled weight decay, the arithmetic of `torch.optim.AdamW`.
//!
//! One pass over memory reads gradient, weight and moments and writes weight, moments and the 16-bit copy:
//!
//! | weights | moments | bytes per parameter with 16-bit gradients |
//! |---|---|---|
//! | `f32` | `f32` | 26 |
//! | `f32` master and 16-bit copy | `f32` | 28 |
//! | `bf16`, stochastic rounding | `f32` | 22 |
//! | `bf16`, stochastic rounding | `bf16`, stochastic rounding | 14 |
//!
//! Arithmetic is `f32` without fused multiply-add, so every SIMD path, split and thread count gives the same bits.

mod simd;
mod storage;
mod update;

use half::{bf16, f16};
use kernels::Float;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::OptimError;
use crate::optimizer::{
    GradWindow, Optimizer, Precision, StateSlot, StateWindow, StepArgs, WeightWindow,
};
use crate::rng::RandomStream;
use simd::Simd;
use update::Rounding;

pub use storage::{Bf16Storage, MomentDtype, PureBf16};

/// Elements per task: longer windows are spread over the rayon pool.
const CHUNK_ELEMS: usize = 1 << 16;

/// The constants of one step, computed in `f64` and rounded once: what the update of an element reads beside its
/// gradient, weight and moments.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Coefficients {
    /// Factor on every gradient.
    pub grad_scale: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `sqrt(1 - beta2^step)`.
    pub sqrt_bias_correction2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// `lr / (1 - beta1^step)`.
    pub step_size: f32,
    /// `1 - lr * weight_decay`.
    pub decay: f32,
}

/// The hyper-parameters that hold for a whole run; rate and decay come with each step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// What pure `bf16` keeps per element.
    #[serde(default)]
    pub pure_bf16: PureBf16,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            pure_bf16: PureBf16::default(),
        }
    }
}

impl AdamW {
    /// Checks the ranges: betas in 0..1, `eps` not negative.
    ///
    /// # Errors
    /// [`OptimError::OutOfRange`] naming the number.
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
        })
    }

    /// The constants of update number `step` (counted from 1).
    ///
    /// # Errors
    /// [`OptimError::StepZero`].
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
        let lr = f64::from(lr);
        Ok(Coefficients {
            grad_scale,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            sqrt_bias_correction2: bias_correction2.sqrt() as f32,
            eps: self.eps as f32,
            step_size: (lr / bias_correction1) as f32,
            decay: (1.0 - lr * f64::from(weight_decay)) as f32,
        })
    }

    /// The stream that stochastic rounding draws from. Elements `2k` and `2k + 1` of step `s` share its block at
    /// `(s, k)`: the low and high half of word 0 round the weight, of word 1 the first moment, of word 2 the second.
    #[must_use]
    pub fn rounding_stream(seed: u64) -> RandomStream {
        RandomStream::new(seed, "optimizer rounding")
    }

    /// The same constants for the kernels of a GPU; the factor of a clip block multiplies `grad_scale`.
    ///
    /// # Errors
    /// [`OptimError::StepZero`].
    #[cfg(feature = "cuda")]
    pub fn scalars(
        &self,
        step: u64,
        lr: f32,
        weight_decay: f32,
        grad_scale: f32,
        seed: u64,
    ) -> Result<kernels::cuda::ops::adamw::Scalars, OptimError> {
        let c = self.coefficients(step, lr, weight_decay, grad_scale)?;
        Ok(kernels::cuda::ops::adamw::Scalars {
            grad_scale: c.grad_scale,
            one_minus_beta1: c.one_minus_beta1,
            beta2: c.beta2,
            one_minus_beta2: c.one_minus_beta2,
            sqrt_bias_correction2: c.sqrt_bias_correction2,
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
        let kernel = Kernel { simd, coefficients };
        let rounding = Rounding {
            stream: Self::rounding_stream(args.seed),
            step: args.step,
            first_element: args.first_element,
        };
        let widened: Vec<f32>;
        let grad = match args.grad {
            GradWindow::F32(grad) => grad,
            GradWindow::Bf16(grad) => {
                widened = grad.iter().map(|x| Float::to_f32(*x)).collect();
                &widened
            }
        };
        let storage = self.pure_bf16.weights;
        match (args.weight, args.state.as_mut_slice()) {
            (WeightWindow::F32(weight), [StateWindow::F32(m), StateWindow::F32(v)]) => {
                kernel.f32(grad, weight, m, v);
            }
            (
                WeightWindow::Mixed { master, weight },
                [StateWindow::F32(m), StateWindow::F32(v)],
            ) => kernel.mixed_bf16(grad, master, weight, m, v),
            (
                WeightWindow::MixedF16 { master, weight },
                [StateWindow::F32(m), StateWindow::F32(v)],
            ) => kernel.mixed_f16(grad, master, weight, m, v),
            (WeightWindow::PureBf16(weight), [StateWindow::Bf16(m), StateWindow::Bf16(v)])
                if storage == Bf16Storage::Stochastic =>
            {
                kernel.pure_bf16(rounding, grad, weight, m, v);
            }
            (WeightWindow::PureBf16(weight), [StateWindow::F32(m), StateWindow::F32(v)])
                if storage == Bf16Storage::Stochastic =>
            {
                kernel.rounded_bf16(rounding, grad, weight, m, v);
            }
            (WeightWindow::PureBf16(weight), state)
                if storage != Bf16Storage::Stochastic
                    && state.len() == self.slots(Precision::PureBf16).len() =>
            {
                update::elementwise(&coefficients, rounding, storage, grad, weight, state);
            }
            (weight, _) => {
                return Err(OptimError::UnsupportedWindows {
                    optimizer: self.name(),
                    weight: weight.kind(),
                    expected: "two moments in f32, or for pure bf16 weights two in bf16 or f32 and, with Kahan \
                               compensation, a third window in bf16",
                });
            }
        }
        Ok(())
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
            WeightWindow::F32(weight) => check("weight", weight.len())?,
            WeightWindow::PureBf16(weight) => check("weight", weight.len())?,
            WeightWindow::Mixed { master, weight } => {
                check("master", master.len())?;
                check("weight", weight.len())?;
            }
            WeightWindow::MixedF16 { master, weight } => {
                check("master", master.len())?;
                check("weight", weight.len())?;
            }
        }
        for (slot, window) in self.slots(args.weight.precision()).iter().zip(&args.state) {
            let got = match window {
                StateWindow::F32(values) => values.len(),
                StateWindow::Bf16(values) => values.len(),
            };
            check(slot.name, got)?;
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn slots(&self, precision: Precision) -> &'static [StateSlot] {
        self.pure_bf16.slots(precision)
    }

    fn step(&self, args: StepArgs<'_>) -> Result<(), OptimError> {
        self.step_on(Simd::detect(), args)
    }
}

/// One step's constants and the instruction set, spread over chunks.
#[derive(Clone, Copy)]
struct Kernel {
    simd: Simd,
    coefficients: Coefficients,
}

impl Kernel {
    fn f32(self, grad: &[f32], weight: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        if grad.len() <= CHUNK_ELEMS {
            return self.simd.f32(&self.coefficients, grad, weight, m, v);
        }
        grad.par_chunks(CHUNK_ELEMS)
            .zip(weight.par_chunks_mut(CHUNK_ELEMS))
            .zip(m.par_chunks_mut(CHUNK_ELEMS))
            .zip(v.par_chunks_mut(CHUNK_ELEMS))
            .for_each(|(((grad, weight), m), v)| self.f32(grad, weight, m, v));
    }

    fn mixed_bf16(
        self,
        grad: &[f32],
        master: &mut [f32],
        weight: &mut [bf16],
        m: &mut [f32],
        v: &mut [f32],
    ) {
        if grad.len() <= CHUNK_ELEMS {
            return self
                .simd
                .mixed_bf16(&self.coefficients, grad, master, weight, m, v);
        }
        grad.par_chunks(CHUNK_ELEMS)
            .zip(master.par_chunks_mut(CHUNK_ELEMS))
            .zip(weight.par_chunks_mut(CHUNK_ELEMS))
            .zip(m.par_chunks_mut(CHUNK_ELEMS))
            .zip(v.par_chunks_mut(CHUNK_ELEMS))
            .for_each(|((((grad, master), weight), m), v)| {
                self.mixed_bf16(grad, master, weight, m, v);
            });
    }

    fn mixed_f16(
        self,
        grad: &[f32],
        master: &mut [f32],
        weight: &mut [f16],
        m: &mut [f32],
        v: &mut [f32],
    ) {
        if grad.len() <= CHUNK_ELEMS {
            return self
                .simd
                .mixed_f16(&self.coefficients, grad, master, weight, m, v);
        }
        grad.par_chunks(CHUNK_ELEMS)
            .zip(master.par_chunks_mut(CHUNK_ELEMS))
            .zip(weight.par_chunks_mut(CHUNK_ELEMS))
            .zip(m.par_chunks_mut(CHUNK_ELEMS))
            .zip(v.par_chunks_mut(CHUNK_ELEMS))
            .for_each(|((((grad, master), weight), m), v)| {
                self.mixed_f16(grad, master, weight, m, v);
            });
    }

    fn pure_bf16(
        self,
        rounding: Rounding,
        grad: &[f32],
        weight: &mut [bf16],
        m: &mut [bf16],
        v: &mut [bf16],
    ) {
        if grad.len() <= CHUNK_ELEMS {
            return self
                .simd
                .pure_bf16(&self.coefficients, rounding, grad, weight, m, v);
        }
        grad.par_chunks(CHUNK_ELEMS)
            .zip(weight.par_chunks_mut(CHUNK_ELEMS))
            .zip(m.par_chunks_mut(CHUNK_ELEMS))
            .zip(v.par_chunks_mut(CHUNK_ELEMS))
            .enumerate()
            .for_each(|(chunk, (((grad, weight), m), v))| {
                let rounding = rounding.advanced((chunk * CHUNK_ELEMS) as u64);
                self.pure_bf16(rounding, grad, weight, m, v);
            });
    }

    fn rounded_bf16(
        self,
        rounding: Rounding,
        grad: &[f32],
        weight: &mut [bf16],
        m: &mut [f32],
        v: &mut [f32],
    ) {
        if grad.len() <= CHUNK_ELEMS {
            return self
                .simd
                .rounded_bf16(&self.coefficients, rounding, grad, weight, m, v);
        }
        grad.par_chunks(CHUNK_ELEMS)
            .zip(weight.par_chunks_mut(CHUNK_ELEMS))
            .zip(m.par_chunks_mut(CHUNK_ELEMS))
            .zip(v.par_chunks_mut(CHUNK_ELEMS))
            .enumerate()
            .for_each(|(chunk, (((grad, weight), m), v))| {
                let rounding = rounding.advanced((chunk * CHUNK_ELEMS) as u64);
                self.rounded_bf16(rounding, grad, weight, m, v);
            });
    }
}

#[cfg(test)]
mod rounding_tests;
#[cfg(test)]
mod tests;
