use proptest::prelude::*;

use super::*;
use half::bf16;
use kernels::Float;

pub(super) const GRAD_SCALE: f32 = 0.37;
pub(super) const LR: f32 = 1e-2;
pub(super) const DECAY: f32 = 0.1;
/// First element of the tests' chunks: 301 elements before the end of a page of rounding keys.
const FIRST: u64 = (1 << 33) - 301;

pub(super) fn numbers(name: &str, n: usize, step: u64) -> Vec<f32> {
    let stream = RandomStream::new(11 + step, name);
    (0..n as u64).map(|i| stream.normal(i)).collect()
}

/// One model with weights and moments in one of the supported layouts.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) master: Vec<f32>,
    pub(super) weight: Vec<bf16>,
    weight_f16: Vec<f16>,
    moments: [Vec<f32>; 2],
    pub(super) moments_bf16: [Vec<bf16>; 2],
    compensation: Vec<bf16>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    F32,
    Mixed,
    MixedF16,
    PureBf16,
    /// `bf16` weights, `f32` moments.
    RoundedBf16,
    Nearest,
    KahanBf16,
    KahanF32,
}

impl Form {
    fn storage(self) -> Bf16Storage {
        match self {
            Self::Nearest => Bf16Storage::Nearest,
            Self::KahanBf16 | Self::KahanF32 => Bf16Storage::Kahan,
            _ => Bf16Storage::Stochastic,
        }
    }

    fn narrow_moments(self) -> bool {
        matches!(self, Self::PureBf16 | Self::Nearest | Self::KahanBf16)
    }
}

pub(super) const FORMS: [Form; 8] = [
    Form::F32,
    Form::Mixed,
    Form::MixedF16,
    Form::PureBf16,
    Form::RoundedBf16,
    Form::Nearest,
    Form::KahanBf16,
    Form::KahanF32,
];

impl Model {
    pub(super) fn new(n: usize) -> Self {
        let master = numbers("weights", n, 0);
        Self {
            weight: master
                .iter()
                .map(|&w| <bf16 as Float>::from_f32(w))
                .collect(),
            weight_f16: vec![f16::ZERO; n],
            moments: [vec![0.0; n], vec![0.0; n]],
            moments_bf16: [vec![bf16::ZERO; n], vec![bf16::ZERO; n]],
            compensation: vec![bf16::ZERO; n],
            master,
        }
    }

    pub(super) fn step(
        &mut self,
        simd: Simd,
        form: Form,
        step: u64,
        grad: impl Into<Grad>,
        cuts: &[usize],
    ) {
        let grad = &grad.into();
        let edges: Vec<usize> = [0]
            .into_iter()
            .chain(cuts.iter().copied())
            .chain([grad.len()])
            .collect();
        for edge in edges.windows(2) {
            self.step_range(simd, form, step, grad, edge[0]..edge[1]);
        }
    }

    fn step_range(
        &mut self,
        simd: Simd,
        form: Form,
        step: u64,
        grad: &Grad,
        range: std::ops::Range<usize>,
    ) {
        let [m, v] = &mut self.moments;
        let [m16, v16] = &mut self.moments_bf16;
        let master = &mut self.master[range.clone()];
        let own = range.clone();
        let weight = match form {
            Form::F32 => WeightChunk::F32(master),
            Form::Mixed => WeightChunk::Mixed {
                master,
                weight: &mut self.weight[own.clone()],
            },
            Form::MixedF16 => WeightChunk::MixedF16 {
                master,
                weight: &mut self.weight_f16[own.clone()],
            },
            _ => WeightChunk::PureBf16(&mut self.weight[own.clone()]),
        };
        let mut state = if form.narrow_moments() {
            vec![
                StateChunk::Bf16(&mut m16[own.clone()]),
                StateChunk::Bf16(&mut v16[own.clone()]),
            ]
        } else {
            vec![
                StateChunk::F32(&mut m[own.clone()]),
                StateChunk::F32(&mut v[own.clone()]),
            ]
        };
        if form.storage() == Bf16Storage::Kahan {
            state.push(StateChunk::Bf16(&mut self.compensation[own]));
        }
        let mut rule = AdamW::default();
        rule.pure_bf16.weights = form.storage();
        let args = StepArgs {
            step,
            lr: LR,
            weight_decay: DECAY,
            grad_scale: GRAD_SCALE,
            seed: 5,
            first_element: FIRST + range.start as u64,
            grad: grad.window(range),
            weight,
            state,
        };
        rule.step_on(simd, args).unwrap();
    }

    pub(super) fn bits(&self) -> Vec<u32> {
        let wide = self
            .master
            .iter()
            .chain(&self.moments[0])
            .chain(&self.moments[1]);
        let narrow = self
            .weight
            .iter()
            .chain(&self.moments_bf16[0])
            .chain(&self.moments_bf16[1])
            .chain(&self.compensation);
        wide.map(|x| x.to_bits())
            .chain(narrow.map(|x| x.to_bits().into()))
            .chain(self.weight_f16.iter().map(|x| x.to_bits().into()))
            .collect()
    }
}

/// Gradient in either width.
#[derive(Clone, Debug)]
pub(super) enum Grad {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl From<&Vec<f32>> for Grad {
    fn from(values: &Vec<f32>) -> Self {
        Self::F32(values.clone())
    }
}

impl Grad {
    pub(super) fn of(values: Vec<f32>, narrow: bool) -> Self {
        if !narrow {
            return Self::F32(values);
        }
        let values = values.iter().map(|&x| <bf16 as Float>::from_f32(x));
        Self::Bf16(values.collect())
    }

    /// The same gradient in `f32`.
    fn widened(&self) -> Self {
        match self {
            Self::F32(_) => self.clone(),
            Self::Bf16(values) => Self::F32(values.iter().map(|x| x.to_f32()).collect()),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    fn window(&self, range: std::ops::Range<usize>) -> GradChunk<'_> {
        match self {
            Self::F32(values) => GradChunk::F32(&values[range]),
            Self::Bf16(values) => GradChunk::Bf16(&values[range]),
        }
    }
}

/// `AdamW` as in the paper, one element in double precision.
#[derive(Clone, Copy)]
struct Reference {
    weight: f64,
    m: f64,
    v: f64,
}

impl Reference {
    fn step(&mut self, step: u64, grad: f32) {
        let (beta1, beta2, eps) = (0.9f64, 0.999f64, 1e-8);
        let (lr, grad) = (f64::from(LR), f64::from(grad) * f64::from(GRAD_SCALE));
        self.m = beta1 * self.m + (1.0 - beta1) * grad;
        self.v = beta2 * self.v + (1.0 - beta2) * grad * grad;
        let m_hat = self.m / (1.0 - beta1.powf(step as f64));
        let v_hat = self.v / (1.0 - beta2.powf(step as f64));
        self.weight -= lr * f64::from(DECAY) * self.weight;
        self.weight -= lr * m_hat / (v_hat.sqrt() + eps);
    }
}

#[test]
fn f32_and_mixed_follow_the_double_precision_reference_for_200_steps() {
    let n = 257;
    let (mut f32_model, mut mixed, mut mixed_f16) = (Model::new(n), Model::new(n), Model::new(n));
    let mut reference: Vec<_> = f32_model
        .master
        .iter()
        .map(|&w| Reference {
            weight: w.into(),
            m: 0.0,
            v: 0.0,
        })
        .collect();
    for step in 1..=200 {
        let grad = numbers("gradients", n, step);
        f32_model.step(Simd::detect(), Form::F32, step, &grad, &[]);
        mixed.step(Simd::detect(), Form::Mixed, step, &grad, &[]);
        mixed_f16.step(Simd::detect(), Form::MixedF16, step, &grad, &[]);
        for (element, &g) in reference.iter_mut().zip(&grad) {
            element.step(step, g);
        }
    }
    for i in 0..n {
        let error = (f64::from(f32_model.master[i]) - reference[i].weight).abs();
        // 200 roundings of a weight of magnitude up to 4 and of updates of magnitude 0.01.
        assert!(
            error < 200.0 * 4.0 * f64::from(f32::EPSILON),
            "element {i}: {error}"
        );
        let v_error = (f64::from(f32_model.moments[1][i]) / reference[i].v - 1.0).abs();
        assert!(
            v_error < 200.0 * 2.0 * f64::from(f32::EPSILON),
            "element {i}: {v_error}"
        );
        assert_eq!(mixed.weight[i], <bf16 as Float>::from_f32(mixed.master[i]));
        assert_eq!(mixed_f16.weight_f16[i], f16::from_f32(mixed.master[i]));
    }
    assert_eq!(f32_model.master, mixed.master);
    assert_eq!(f32_model.master, mixed_f16.master);
}

#[test]
fn every_instruction_set_gives_the_bits_of_a_scalar_loop() {
    let n = 1027;
    for simd in Simd::available() {
        let mut model = Model::new(n);
        let (mut w, mut m, mut v) = (model.master.clone(), vec![0f32; n], vec![0f32; n]);
        for step in 1..=3u64 {
            let grad = numbers("gradients", n, step);
            model.step(simd, Form::F32, step, &grad, &[]);
            let bias1 = 1.0 - 0.9f64.powf(step as f64);
            let bias2 = (1.0 - 0.999f64.powf(step as f64)).sqrt();
            let step_size = (f64::from(LR) * bias2 / bias1) as f32;
            let eps = (1e-8 * bias2) as f32;
            let decay = (1.0 - f64::from(LR) * f64::from(DECAY)) as f32;
            for i in 0..n {
                let g = std::hint::black_box(grad[i]) * GRAD_SCALE;
                m[i] += (g - m[i]) * (1.0f64 - 0.9) as f32;
                v[i] = v[i] * 0.999 + g * g * (1.0f64 - 0.999) as f32;
                w[i] = w[i] * decay - step_size * m[i] / (v[i].sqrt() + eps);
            }
        }
        assert_eq!(model.master, w, "{simd:?}");
        assert_eq!(model.moments, [m, v], "{simd:?}");
    }
}

fn assert_split_invariant(n: usize, cuts: &[usize]) {
    for form in FORMS {
        for narrow in [false, true] {
            let grad = |step| Grad::of(numbers("gradients", n, step), narrow);
            let mut whole = Model::new(n);
            for step in 1..=2 {
                // Other vectors and another order of elements; the result must be the same.
                whole.step(Simd::Portable, form, step, grad(step).widened(), &[]);
            }
            for simd in Simd::available() {
                let mut split = Model::new(n);
                for step in 1..=2 {
                    split.step(simd, form, step, grad(step), cuts);
                }
                assert!(
                    whole.bits() == split.bits(),
                    "{form:?} {simd:?} {narrow} {n} {cuts:?}"
                );
            }
        }
    }
}

#[test]
fn threads_and_splits_of_a_long_slice_do_not_change_a_bit() {
    let n = 2 * update::CHUNK_ELEMS + 771;
    assert_split_invariant(n, &[]);
    assert_split_invariant(n, &[1, 333, update::CHUNK_ELEMS + 5]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn an_update_has_the_same_bits_for_any_split(
        n in 1usize..700,
        cuts in proptest::collection::vec(0usize..700, 0..5),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(n)).collect();
        cuts.sort_unstable();
        assert_split_invariant(n, &cuts);
    }
}

#[test]
fn invalid_step_arguments_are_refused_and_change_nothing() {
    let mut weight = vec![1.0f32; 4];
    let mut refused = |step, m: StateChunk<'_>, v: StateChunk<'_>| {
        let args = StepArgs {
            step,
            lr: 1.0,
            weight_decay: 0.0,
            grad_scale: 1.0,
            seed: 0,
            first_element: 0,
            grad: GradChunk::F32(&[1.0; 4]),
            weight: WeightChunk::F32(&mut weight),
            state: vec![m, v],
        };
        AdamW::default().step(args).unwrap_err()
    };
    let (m, v) = (&mut [0.0f32; 4], &mut [0.0f32; 4]);
    let short = refused(1, StateChunk::F32(m), StateChunk::F32(&mut v[..3]));
    assert!(matches!(
        short,
        OptimError::LengthMismatch {
            window: "exp_avg_sq",
            expected: 4,
            got: 3
        }
    ));
    let mixed = refused(
        1,
        StateChunk::F32(m),
        StateChunk::Bf16(&mut [bf16::ZERO; 4]),
    );
    assert!(matches!(
        mixed,
        OptimError::UnsupportedWindows { weight: "f32", .. }
    ));
    assert!(matches!(
        refused(0, StateChunk::F32(m), StateChunk::F32(v)),
        OptimError::StepZero
    ));
    assert_eq!(weight, [1.0; 4]);
    assert!(AdamW::new(1.0, 0.999, 1e-8).is_err());
    assert!(AdamW::new(0.9, 0.999, f64::INFINITY).is_err());
}
