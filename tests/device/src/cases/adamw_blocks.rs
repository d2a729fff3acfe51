//! `AdamW` with moments of 8 bits: bit-equal to the update rule of the CPU over several successive steps.

use anyhow::{Result, ensure};
use half::{bf16, f16};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::adamw::{self, AdamWChunk, Form};
use optim::{AdamW, GradChunk, Optimizer, StateChunk, StepArgs, WeightChunk};

use super::adamw::{
    GRAD_DTYPES, LR, SEED, STEPS, WEIGHT_DECAY, clip, gradient, holds, special_weights,
};
use super::{Case, Effort};
use crate::machine::{Buffer, Machine};
use crate::numbers::{bytes, widened};

/// A block whose gradients are zero.
const ZEROS: std::ops::Range<usize> = 512..768;

/// All forms with 8-bit moments and gradient dtypes. Lengths are around a block, and numbers of the first element around
/// a pair and a page of the rounding stream.
pub(super) fn cases(effort: Effort) -> Vec<Case> {
    let long = match effort {
        Effort::Emulated => 2500,
        Effort::Gpu => 5_000_003,
    };
    let places = [
        (1, 0),
        (255, 3),
        (256, 64),
        (900, 11),
        (long, (1 << 33) - 299),
    ];
    let mut cases = Vec::new();
    let forms = Form::ALL.into_iter();
    for form in forms.filter(|form| form.moment_dtype() == DType::U8) {
        for grad in GRAD_DTYPES {
            for (n, first) in places {
                let name = format!("adamw {form:?}, {grad} gradient, {n} elements from {first}");
                cases.push(Case::new(name, move |machine| {
                    check(machine, form, grad, (n, first))
                }));
            }
        }
    }
    cases
}

/// Weights and moments on the CPU.
struct Model {
    form: Form,
    weight: Vec<f32>,
    copy: Vec<f32>,
    codes: [Vec<u8>; 2],
    absmax: [Vec<f32>; 2],
}

impl Model {
    fn new(form: Form, n: usize) -> Self {
        let absmax = vec![0.0; n.div_ceil(Form::BLOCK_ELEMS)];
        Self {
            form,
            weight: special_weights(form, n),
            copy: vec![1.0; n],
            codes: [vec![0; n], vec![0; n]],
            absmax: [absmax.clone(), absmax],
        }
    }

    fn step(&mut self, step: u64, grad_scale: f32, grad: &[f32], first_element: u64) -> Result<()> {
        let n = grad.len();
        let mut weight16: Vec<bf16> = self.weight.iter().map(|x| bf16::from_f32(*x)).collect();
        let (mut copy, mut copy_f16) = (vec![bf16::ZERO; n], vec![f16::ZERO; n]);
        let master = &mut self.weight[..];
        let weight = match self.form.elementwise() {
            Form::F32 => WeightChunk::F32(master),
            Form::MasterBf16 => WeightChunk::Mixed {
                master,
                weight: &mut copy,
            },
            Form::MasterF16 => WeightChunk::MixedF16 {
                master,
                weight: &mut copy_f16,
            },
            _ => WeightChunk::PureBf16(&mut weight16),
        };
        let ([m, v], [of_m, of_v]) = (&mut self.codes, &mut self.absmax);
        let rule = AdamW {
            eight_bit: true,
            ..AdamW::default()
        };
        rule.step(StepArgs {
            step,
            lr: LR,
            weight_decay: WEIGHT_DECAY,
            grad_scale,
            seed: SEED,
            first_element,
            grad: GradChunk::F32(grad),
            weight,
            state: vec![moment(m, of_m), moment(v, of_v)],
        })?;
        match self.form.copy() {
            Some(DType::F16) => self.copy = copy_f16.iter().map(|x| x.to_f32()).collect(),
            Some(_) => self.copy = copy.iter().map(|x| x.to_f32()).collect(),
            None if self.form.weight() == DType::BF16 => {
                self.weight = weight16.iter().map(|x| x.to_f32()).collect();
            }
            None => {}
        }
        Ok(())
    }
}

const fn moment<'a>(codes: &'a mut [u8], absmax: &'a mut [f32]) -> StateChunk<'a> {
    StateChunk::Blockwise { codes, absmax }
}

/// The same buffers on the device.
struct Uploaded {
    weight: Buffer,
    copy: Option<(DType, Buffer)>,
    codes: [Buffer; 2],
    absmax: [Buffer; 2],
}

impl Uploaded {
    fn new(machine: &mut dyn Machine, model: &Model) -> Result<Self> {
        let weight = machine.upload(&bytes(model.form.weight(), &model.weight))?;
        let copy = match model.form.copy() {
            Some(dtype) => Some((dtype, machine.upload(&bytes(dtype, &model.copy))?)),
            None => None,
        };
        let [m, v] = &model.codes;
        let codes = [machine.upload(m)?, machine.upload(v)?];
        let [m, v] = &model.absmax;
        let absmax = [machine.upload(m)?, machine.upload(v)?];
        Ok(Self {
            weight,
            copy,
            codes,
            absmax,
        })
    }

    fn compare(&self, machine: &mut dyn Machine, model: &Model, when: &str) -> Result<()> {
        let weight = (model.form.weight(), self.weight, &model.weight);
        let copy = self
            .copy
            .map(|(dtype, buffer)| (dtype, buffer, &model.copy));
        let absmax = self.absmax.iter().zip(&model.absmax);
        let absmax = absmax.map(|(buffer, want)| (DType::F32, *buffer, want));
        for (i, (dtype, buffer, want)) in [weight].into_iter().chain(absmax).chain(copy).enumerate()
        {
            let name = [
                "weight",
                "absmax of exp_avg",
                "absmax of exp_avg_sq",
                "copy",
            ][i];
            holds(machine, (name, dtype, buffer), want, when)?;
        }
        for (buffer, want) in self.codes.iter().zip(&model.codes) {
            let got = machine.download::<u8>(*buffer)?;
            let at = got.iter().zip(want).position(|(got, want)| got != want);
            ensure!(at.is_none(), "{when}: code {at:?} differs");
        }
        Ok(())
    }
}

fn check(
    machine: &mut dyn Machine,
    form: Form,
    grad_dtype: DType,
    (n, first_element): (usize, u64),
) -> Result<()> {
    let mut model = Model::new(form, n);
    let device = Uploaded::new(machine, &model)?;
    let rule = AdamW::default();
    for (i, step) in STEPS.into_iter().enumerate() {
        let mut grad = gradient(grad_dtype, step, n);
        let zeros = ZEROS.start.min(n)..ZEROS.end.min(n);
        grad[zeros].fill(0.0);
        let (grad_scale, factor) = [(1.0, None), (1.0, Some(0.37)), (0.61, Some(0.73))][i];
        let scalars =
            machine.upload(&[rule.scalars(step, LR, WEIGHT_DECAY, grad_scale, SEED)?])?;
        let clip = match factor {
            Some(factor) => machine.upload(&[clip(factor, 0)])?.address,
            None => Address::NULL,
        };
        let chunk = AdamWChunk {
            form,
            grad_dtype,
            grad: machine.upload(&bytes(grad_dtype, &grad))?.address,
            weight: device.weight.address,
            copy: device.copy.map_or(Address::NULL, |(_, copy)| copy.address),
            exp_avg: device.codes[0].address,
            exp_avg_sq: device.codes[1].address,
            absmax: device.absmax.map(|buffer| buffer.address),
            n: n as u64,
            first_element,
        };
        let launch = adamw::launch(&chunk, scalars.address, clip);
        machine.launch(&launch.expect("float dtypes"))?;
        let scale = grad_scale * factor.unwrap_or(1.0);
        model.step(step, scale, &widened(grad_dtype, &grad), first_element)?;
        device.compare(machine, &model, &format!("step {step}"))?;
    }
    Ok(())
}
