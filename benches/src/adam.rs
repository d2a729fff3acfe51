//! Benchmark of one `AdamW` step over flat buffers, in every form, and of the in-place read-modify-write that bounds
//! it.

use half::bf16;
use memmap2::{Advice, MmapMut};
use optim::adamw::BLOCK_ELEMS;
use optim::{
    AdamW, Bf16Storage, GradChunk, Optimizer, PureBf16, StateChunk, StepArgs, WeightChunk,
};
use rayon::prelude::*;
use std::marker::PhantomData;

/// Kind of update to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// No update: multiplies every element of one `f32` array in place.
    ReadModifyWrite,
    /// `f32` weights and moments.
    F32,
    /// `f32` master weights and moments, and a `bf16` copy that is only written.
    Master,
    /// `bf16` weights with stochastic rounding, `f32` moments.
    Moments,
    /// `bf16` weights and moments with stochastic rounding.
    Pure,
    /// `bf16` weights with Kahan compensation, `bf16` moments.
    Kahan,
    /// `f32` weights, moments of 8 bits.
    EightBit,
    /// `f32` master weights and a `bf16` copy that is only written, moments of 8 bits.
    EightBitMaster,
}

/// Kind of update with the width of its gradient.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Variant {
    /// Name on command lines.
    pub name: &'static str,
    /// Kind of update.
    pub form: Form,
    /// Whether the gradient is `bf16`.
    pub narrow_grad: bool,
    /// Bytes moved per element: each buffer once for every read and once for every write.
    pub bytes: usize,
}

impl Variant {
    /// All variants.
    pub const ALL: [Self; 12] = [
        Self::new("rmw", Form::ReadModifyWrite, false, 8),
        Self::new("f32", Form::F32, false, 28),
        Self::new("f32-bf16-grad", Form::F32, true, 26),
        Self::new("master-f32-grad", Form::Master, false, 30),
        Self::new("master", Form::Master, true, 28),
        Self::new("moments-f32-grad", Form::Moments, false, 24),
        Self::new("moments", Form::Moments, true, 22),
        Self::new("pure-f32-grad", Form::Pure, false, 16),
        Self::new("pure", Form::Pure, true, 14),
        Self::new("kahan", Form::Kahan, true, 18),
        Self::new("f32-8bit", Form::EightBit, false, 16),
        Self::new("master-8bit-f32-grad", Form::EightBitMaster, false, 18),
    ];

    const fn new(name: &'static str, form: Form, narrow_grad: bool, bytes: usize) -> Self {
        Self {
            name,
            form,
            narrow_grad,
            bytes,
        }
    }

    /// Variant with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|variant| variant.name == name)
    }
}

/// Array in huge pages, if the system grants them.
#[derive(Debug)]
pub(crate) struct Array<T> {
    map: MmapMut,
    kind: PhantomData<T>,
}

impl<T: bytemuck::Pod + Send + Sync> Array<T> {
    pub(crate) fn new(elems: usize, value: T) -> Self {
        let map = MmapMut::map_anon(elems * size_of::<T>()).expect("memory for a benchmark");
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise(Advice::HugePage) {
            eprintln!("no huge pages: {error}");
        }
        let mut array = Self {
            map,
            kind: PhantomData,
        };
        // First touch by the threads that will update it.
        array.get_mut().par_iter_mut().for_each(|x| *x = value);
        array
    }

    /// Gradients near a normal distribution of deviation 0.006. The time of 8-bit moments depends on their values.
    fn of_gradients(elems: usize, from_f32: impl Fn(f32) -> T) -> Self {
        let mut array = Self::new(elems, from_f32(0.0));
        let mut state = 1u64;
        let mut uniform = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        for x in array.get_mut() {
            *x = from_f32(1e-2 * (uniform() + uniform() + uniform() + uniform()));
        }
        array
    }

    pub(crate) fn get(&self) -> &[T] {
        bytemuck::cast_slice(&self.map)
    }

    pub(crate) fn get_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.map)
    }
}

/// Buffers of one length, allocated at their first use and reused by later steps.
#[derive(Debug)]
pub struct Buffers {
    elems: usize,
    step: u64,
    wide_grad: Option<Array<f32>>,
    narrow_grad: Option<Array<bf16>>,
    wide: [Option<Array<f32>>; 3],
    narrow: [Option<Array<bf16>>; 4],
    codes: [Option<Array<u8>>; 2],
    absmax: [Option<Array<f32>>; 2],
}

impl Buffers {
    /// Buffers for `elems` elements.
    #[must_use]
    pub fn new(elems: usize) -> Self {
        Self {
            elems,
            step: 0,
            wide_grad: None,
            narrow_grad: None,
            wide: [const { None }; 3],
            narrow: [const { None }; 4],
            codes: [const { None }; 2],
            absmax: [const { None }; 2],
        }
    }

    /// Runs one step of a variant.
    ///
    /// # Panics
    /// When memory is exhausted.
    pub fn run(&mut self, variant: Variant) {
        let n = self.elems;
        self.step += 1;
        let wide = |slot: &'_ mut Option<Array<f32>>, value| {
            slot.get_or_insert_with(|| Array::new(n, value));
        };
        let needs_wide = match variant.form {
            Form::ReadModifyWrite => 1,
            Form::F32 | Form::Master => 3,
            Form::Moments => 2,
            Form::Pure | Form::Kahan => 0,
            Form::EightBit | Form::EightBitMaster => 3,
        };
        for slot in &mut self.wide[..needs_wide] {
            wide(slot, 1e-3);
        }
        let needs_narrow = match variant.form {
            Form::ReadModifyWrite | Form::F32 | Form::EightBit => 0,
            Form::Master | Form::Moments | Form::EightBitMaster => 1,
            Form::Pure => 3,
            Form::Kahan => 4,
        };
        for slot in &mut self.narrow[..needs_narrow] {
            slot.get_or_insert_with(|| Array::new(n, bf16::from_f32(1e-3)));
        }
        let coded = matches!(variant.form, Form::EightBit | Form::EightBitMaster);
        for slot in self.codes.iter_mut().filter(|_| coded) {
            slot.get_or_insert_with(|| Array::new(n, 200));
        }
        for slot in self.absmax.iter_mut().filter(|_| coded) {
            slot.get_or_insert_with(|| Array::new(n.div_ceil(BLOCK_ELEMS), 1e-3));
        }
        let step = self.step;
        let [a, b, c] = &mut self.wide;
        let [weight, m, v, error] = &mut self.narrow;
        if variant.form == Form::ReadModifyWrite {
            return scale(slice(a));
        }
        let grad = if variant.narrow_grad {
            let grad = self
                .narrow_grad
                .get_or_insert_with(|| Array::of_gradients(n, bf16::from_f32));
            GradChunk::Bf16(grad.get())
        } else {
            let grad = self
                .wide_grad
                .get_or_insert_with(|| Array::of_gradients(n, |x| x));
            GradChunk::F32(grad.get())
        };
        let (weight, state) = match variant.form {
            Form::EightBit => (
                WeightChunk::F32(slice(c)),
                in_blocks(&mut self.codes, &mut self.absmax),
            ),
            Form::EightBitMaster => (
                WeightChunk::Mixed {
                    master: slice(c),
                    weight: slice(weight),
                },
                in_blocks(&mut self.codes, &mut self.absmax),
            ),
            Form::F32 | Form::ReadModifyWrite => (
                WeightChunk::F32(slice(c)),
                vec![StateChunk::F32(slice(a)), StateChunk::F32(slice(b))],
            ),
            Form::Master => {
                let (master, weight) = (slice(c), slice(weight));
                (
                    WeightChunk::Mixed { master, weight },
                    vec![StateChunk::F32(slice(a)), StateChunk::F32(slice(b))],
                )
            }
            Form::Moments => (
                WeightChunk::PureBf16(slice(weight)),
                vec![StateChunk::F32(slice(a)), StateChunk::F32(slice(b))],
            ),
            Form::Pure => (
                WeightChunk::PureBf16(slice(weight)),
                vec![StateChunk::Bf16(slice(m)), StateChunk::Bf16(slice(v))],
            ),
            Form::Kahan => (
                WeightChunk::PureBf16(slice(weight)),
                vec![
                    StateChunk::Bf16(slice(m)),
                    StateChunk::Bf16(slice(v)),
                    StateChunk::Bf16(slice(error)),
                ],
            ),
        };
        let mut rule = AdamW {
            eight_bit: coded,
            ..AdamW::default()
        };
        if variant.form == Form::Kahan {
            rule.pure_bf16 = PureBf16 {
                weights: Bf16Storage::Kahan,
                ..PureBf16::default()
            };
        }
        let args = StepArgs {
            step,
            lr: 1e-4,
            weight_decay: 0.1,
            grad_scale: 1.0,
            seed: 1,
            first_element: 0,
            grad,
            weight,
            state,
        };
        rule.step(args).expect("windows that fit the rule");
    }
}

fn in_blocks<'a>(
    codes: &'a mut [Option<Array<u8>>; 2],
    absmax: &'a mut [Option<Array<f32>>; 2],
) -> Vec<StateChunk<'a>> {
    let moments = codes.iter_mut().zip(absmax);
    moments
        .map(|(codes, absmax)| StateChunk::Blockwise {
            codes: slice(codes),
            absmax: slice(absmax),
        })
        .collect()
}

fn slice<T: bytemuck::Pod + Send + Sync>(array: &mut Option<Array<T>>) -> &mut [T] {
    array.as_mut().expect("an array made above").get_mut()
}

/// Multiplies every element in place, on all threads of the rayon pool.
pub(crate) fn scale(values: &mut [f32]) {
    values.par_chunks_mut(1 << 16).for_each(|part| {
        for x in part {
            *x *= 0.999_99;
        }
    });
}
