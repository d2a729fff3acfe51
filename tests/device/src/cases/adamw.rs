//! `AdamW`: bit-equal to the update rule of the CPU over several successive steps.

use anyhow::{Result, ensure};
use half::{bf16, f16};
use kernels::DType;
use kernels::cuda::launch::Address;
use kernels::cuda::ops::adamw::{self, AdamWChunk, Form};
use kernels::cuda::ops::grad_norm::Clip;
use optim::{AdamW, GradChunk, Optimizer, StateChunk, StepArgs, WeightChunk};

use super::{Case, Effort};
use crate::machine::{Buffer, Machine};
use crate::numbers::{bytes, first_difference, values, widened};
use crate::random::Operands;

pub(super) const GRAD_DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
pub(super) const SEED: u64 = 77;
pub(super) const LR: f32 = 1e-2;
pub(super) const WEIGHT_DECAY: f32 = 0.1;
/// Elements after a window, which must not change.
const MARGIN: usize = 9;
/// Step numbers. The last one exceeds 32 bits, so the counter of the rounding stream has a high word.
pub(super) const STEPS: [u64; 3] = [1, 2, (1 << 33) + 5];

/// Elements whose first moment is the largest bf16 number. A gradient of the largest f32 number moves it further, and
/// rounding must not reach infinity.
const LARGE: std::ops::Range<usize> = 100..190;

/// Position of a window in its buffers.
#[derive(Clone, Copy, Debug)]
struct Span {
    n: usize,
    /// Elements before the window, in the gradient and in all other buffers.
    shifts: [usize; 2],
    first_element: u64,
}

/// All forms and gradient dtypes, with windows around the width of a thread and off its boundaries.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let place = |n, shifts, first_element| Span {
        n,
        shifts,
        first_element,
    };
    let mut places = vec![
        place(1, [0, 0], 0),
        place(7, [3, 3], 3),
        place(29, [0, 0], 11),
        place(2051, [5, 5], 1000),
        place(300, [0, 1], 64),
        // The rounding key changes inside the window, at an element that starts no group of eight.
        place(600, [0, 0], (1 << 33) - 299),
    ];
    places.push(match effort {
        Effort::Emulated => place(4100, [0, 0], (1 << 33) + 1),
        Effort::Gpu => place(5_000_003, [3, 3], (1 << 33) + 1),
    });
    let mut cases = Vec::new();
    let elementwise = |form: &Form| form.elementwise() == *form;
    for form in Form::ALL.into_iter().filter(elementwise) {
        for grad in GRAD_DTYPES {
            for &place in &places {
                let Span { n, shifts, .. } = place;
                let name = format!(
                    "adamw {form:?}, {grad} gradient, {n} elements from {} at {shifts:?}",
                    place.first_element
                );
                cases.push(Case::new(name, move |machine| {
                    check(machine, form, grad, place)
                }));
            }
        }
        let name = format!("adamw {form:?}, a skipped step");
        cases.push(Case::new(name, move |machine| check_skip(machine, form)));
    }
    cases.extend(super::adamw_blocks::cases(effort));
    cases
}

/// Weights of `form` with values beyond the reach of a rounding carry, and values that never become finite again.
pub(super) fn special_weights(form: Form, len: usize) -> Vec<f32> {
    let mut weight = widened(form.weight(), &Operands::new(5).normal("weight", len, 1.0));
    let special = [f32::MAX, f32::MIN, f32::INFINITY, f32::NAN, -0.0, 1e-40];
    for (weight, special) in weight.iter_mut().skip(9).step_by(5).zip(special) {
        *weight = special;
    }
    widened(form.weight(), &weight)
}

/// Weights and state on the CPU, with the elements around the window.
struct Model {
    form: Form,
    place: Span,
    /// Weights or master weights, first and second moment, in f32 or rounded to their dtype.
    kept: [Vec<f32>; 3],
    copy: Vec<f32>,
}

impl Model {
    fn new(form: Form, place: Span) -> Self {
        let len = place.shifts[1] + place.n + MARGIN;
        let draw = |name, dtype, scale| {
            let values = Operands::new(5).normal(name, len, scale);
            widened(dtype, &values)
        };
        let squares = draw("exp_avg_sq", DType::F32, 0.1);
        let squares: Vec<f32> = squares.iter().map(|x| x * x).collect();
        let mut exp_avg = draw("exp_avg", form.moment_dtype(), 0.1);
        exp_avg
            .iter_mut()
            .skip(LARGE.start)
            .take(LARGE.len())
            .for_each(|m| *m = bf16::MAX.to_f32());
        Self {
            form,
            place,
            kept: [
                special_weights(form, len),
                exp_avg,
                widened(form.moment_dtype(), &squares),
            ],
            copy: vec![1.0; len],
        }
    }

    fn dtypes(&self) -> [DType; 3] {
        [
            self.form.weight(),
            self.form.moment_dtype(),
            self.form.moment_dtype(),
        ]
    }

    /// Steps the window with the CPU's rule.
    fn step(&mut self, rule: &AdamW, step: u64, grad_scale: f32, grad: &[f32]) -> Result<()> {
        let own = self.place.shifts[1]..self.place.shifts[1] + self.place.n;
        let [weight, m, v] = &mut self.kept;
        let (weight, m, v) = (
            &mut weight[own.clone()],
            &mut m[own.clone()],
            &mut v[own.clone()],
        );
        let narrow =
            |values: &[f32]| -> Vec<bf16> { values.iter().map(|x| bf16::from_f32(*x)).collect() };
        let (mut weight16, mut m16, mut v16) = (narrow(weight), narrow(m), narrow(v));
        let mut copy16 = vec![bf16::ZERO; self.place.n];
        let mut copy_f16 = vec![f16::ZERO; self.place.n];
        let weight = match self.form {
            Form::F32 => WeightChunk::F32(weight),
            Form::MasterBf16 => WeightChunk::Mixed {
                master: weight,
                weight: &mut copy16,
            },
            Form::MasterF16 => WeightChunk::MixedF16 {
                master: weight,
                weight: &mut copy_f16,
            },
            _ => WeightChunk::PureBf16(&mut weight16),
        };
        let state = match self.form {
            Form::PureBf16 => vec![StateChunk::Bf16(&mut m16), StateChunk::Bf16(&mut v16)],
            _ => vec![StateChunk::F32(m), StateChunk::F32(v)],
        };
        rule.step(StepArgs {
            step,
            lr: LR,
            weight_decay: WEIGHT_DECAY,
            grad_scale,
            seed: SEED,
            first_element: self.place.first_element,
            grad: GradChunk::F32(grad),
            weight,
            state,
        })?;
        let put = |to: &mut [f32], from: &[bf16]| {
            to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
        };
        if self.form.weight() == DType::BF16 {
            put(&mut self.kept[0][own.clone()], &weight16);
        }
        if self.form.moment_dtype() == DType::BF16 {
            put(&mut self.kept[1][own.clone()], &m16);
            put(&mut self.kept[2][own.clone()], &v16);
        }
        match self.form.copy() {
            Some(DType::F16) => {
                let copies = self.copy[own].iter_mut().zip(&copy_f16);
                copies.for_each(|(to, x)| *to = x.to_f32());
            }
            Some(_) => put(&mut self.copy[own], &copy16),
            None => {}
        }
        Ok(())
    }
}

/// The same buffers on the device.
struct Uploaded {
    kept: [Buffer; 3],
    copy: Option<(DType, Buffer)>,
}

impl Uploaded {
    fn new(machine: &mut dyn Machine, model: &Model) -> Result<Self> {
        let [a, b, c] = model.dtypes();
        let mut upload = |dtype, values: &[f32]| machine.upload(&bytes(dtype, values));
        let [w, m, v] = &model.kept;
        let kept = [upload(a, w)?, upload(b, m)?, upload(c, v)?];
        let copy = match model.form.copy() {
            Some(dtype) => Some((dtype, upload(dtype, &model.copy)?)),
            None => None,
        };
        Ok(Self { kept, copy })
    }

    fn window(&self, model: &Model, (grad_dtype, grad): (DType, Buffer)) -> AdamWChunk {
        let [grad_shift, shift] = model.place.shifts;
        let at = |buffer: Buffer, dtype: DType, shift: usize| {
            Address(buffer.address.0 + (shift * dtype.size_bytes()) as u64)
        };
        let [weight, moment_dtype, _] = model.dtypes();
        AdamWChunk {
            form: model.form,
            grad_dtype,
            grad: at(grad, grad_dtype, grad_shift),
            weight: at(self.kept[0], weight, shift),
            copy: self
                .copy
                .map_or(Address::NULL, |(dtype, buffer)| at(buffer, dtype, shift)),
            exp_avg: at(self.kept[1], moment_dtype, shift),
            exp_avg_sq: at(self.kept[2], moment_dtype, shift),
            absmax: [Address::NULL; 2],
            n: model.place.n as u64,
            first_element: model.place.first_element,
        }
    }

    fn compare(&self, machine: &mut dyn Machine, model: &Model, when: &str) -> Result<()> {
        let names = ["weight", "exp_avg", "exp_avg_sq"];
        let kept = names.into_iter().zip(model.dtypes()).zip(self.kept);
        let kept = kept
            .zip(&model.kept)
            .map(|(((name, dtype), buffer), want)| (name, dtype, buffer, want));
        let copy = self
            .copy
            .map(|(dtype, buffer)| ("copy", dtype, buffer, &model.copy));
        for (name, dtype, buffer, want) in kept.chain(copy) {
            holds(machine, (name, dtype, buffer), want, when)?;
        }
        Ok(())
    }
}

/// Gradients with zeros, with subnormal or infinite squares, and with infinity.
pub(super) fn gradient(dtype: DType, step: u64, len: usize) -> Vec<f32> {
    let mut grad = Operands::new(100 + step).normal("gradient", len, 0.2);
    let special = [0.0, 1e-22, -1e-30, 3e19, 1e38, f32::INFINITY];
    for (grad, special) in grad.iter_mut().skip(20).step_by(7).zip(special) {
        *grad = special;
    }
    grad.iter_mut()
        .skip(LARGE.start)
        .take(LARGE.len())
        .for_each(|g| *g = f32::MAX);
    widened(dtype, &grad)
}

fn check(machine: &mut dyn Machine, form: Form, grad_dtype: DType, place: Span) -> Result<()> {
    let mut model = Model::new(form, place);
    let device = Uploaded::new(machine, &model)?;
    let rule = AdamW::default();
    for (i, step) in STEPS.into_iter().enumerate() {
        let grad = gradient(grad_dtype, step, place.shifts[0] + place.n);
        // The first step takes its factor from the scalars alone, the others from both blocks.
        let (grad_scale, factor) = [(1.0, None), (1.0, Some(0.37)), (0.61, Some(0.73))][i];
        let scalars = rule.scalars(step, LR, WEIGHT_DECAY, grad_scale, SEED)?;
        let scalars = machine.upload(&[scalars])?;
        let clip = match factor {
            Some(factor) => machine.upload(&[clip(factor, 0)])?.address,
            None => Address::NULL,
        };
        let uploaded = machine.upload(&bytes(grad_dtype, &grad))?;
        let window = device.window(&model, (grad_dtype, uploaded));
        let launch = adamw::launch(&window, scalars.address, clip);
        machine.launch(&launch.expect("float dtypes"))?;
        let scale = grad_scale * factor.unwrap_or(1.0);
        model.step(&rule, step, scale, &grad[place.shifts[0]..])?;
        device.compare(machine, &model, &format!("step {step}"))?;
    }
    Ok(())
}

fn check_skip(machine: &mut dyn Machine, form: Form) -> Result<()> {
    let place = Span {
        n: 100,
        shifts: [0, 0],
        first_element: 0,
    };
    let model = Model::new(form, place);
    let device = Uploaded::new(machine, &model)?;
    let scalars = machine.upload(&[AdamW::default().scalars(1, 0.1, 0.1, 1.0, SEED)?])?;
    let clip = machine.upload(&[clip(1.0, 1)])?;
    let grad = machine.upload(&bytes(DType::F32, &gradient(DType::F32, 1, place.n)))?;
    let window = device.window(&model, (DType::F32, grad));
    let launch = adamw::launch(&window, scalars.address, clip.address);
    machine.launch(&launch.expect("float dtypes"))?;
    device.compare(machine, &model, "skipped")
}

pub(super) fn clip(factor: f32, skip: u32) -> Clip {
    Clip {
        norm: 1.0,
        loss: 1.0,
        factor,
        skip,
    }
}

/// Fails unless `buffer` has the values `want` of `dtype`, bit for bit; any NaN counts as equal.
pub(super) fn holds(
    machine: &mut dyn Machine,
    (name, dtype, buffer): (&str, DType, Buffer),
    want: &[f32],
    when: &str,
) -> Result<()> {
    let got = values(dtype, &machine.download::<u8>(buffer)?);
    let at = first_difference(&got, want);
    ensure!(
        at.is_none(),
        "{when}: {name}[{at:?}] is {:?} instead of {:?}",
        at.map(|at| got[at]),
        at.map(|at| want[at])
    );
    Ok(())
}
