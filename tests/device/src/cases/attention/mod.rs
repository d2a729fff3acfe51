//! Attention and its gradients, compared with f64.

mod call;
mod exact;

use anyhow::{Result, ensure};
use kernels::DType;
use kernels::cuda::device_kind::AttentionBackward::{self, Fused, Split};
use kernels::cuda::module::Module;

use self::call::{Call, Results};
use self::exact::{Bounded, Exact, Statistics, Values};
use super::{Case, Effort};
use crate::machine::Machine;
use crate::reference::Attention;

/// Numbers of multiprocessors. Few give tiles of 128 queries even for small calls; many give tiles of 64.
const FEW: u32 = 1;
const MANY: u32 = 1 << 20;

const BACKWARDS: [AttentionBackward; 2] = [Split, Fused];

/// What names of cases say about the kernels of the backward.
fn of(backward: AttentionBackward) -> &'static str {
    match backward {
        Split => "",
        Fused => ", fused backward",
    }
}

fn starts(lengths: &[usize]) -> Vec<usize> {
    let mut all = vec![0];
    for n in lengths {
        all.push(all[all.len() - 1] + n);
    }
    all
}

/// Shape of a call over sequences of (queries, keys).
fn shape(lengths: &[(usize, usize)], (h, g): (usize, usize), d: usize, causal: bool) -> Attention {
    let (q, k): (Vec<_>, Vec<_>) = lengths.iter().copied().unzip();
    Attention {
        q_starts: starts(&q),
        k_starts: starts(&k),
        h,
        g,
        d,
        causal,
        // Exact in f32, so kernels and reference use the same scale.
        scale: f64::from((1.0 / (d as f64).sqrt()) as f32),
    }
}

fn mask_name(causal: bool) -> &'static str {
    if causal { "causal" } else { "full" }
}

/// Sequence lengths around the tile sizes with equal numbers of queries and keys. The others have more keys (a cached
/// prefix), fewer keys (the first queries see none), no keys, or no queries.
const EQUAL: &[(usize, usize)] = &[(1, 1), (63, 63), (64, 64), (65, 65), (129, 129)];
const UNEQUAL: &[(usize, usize)] = &[
    (5, 70),
    (129, 64),
    (0, 9),
    (64, 0),
    (65, 130),
    (0, 0),
    (3, 1),
];

/// Cases of the tensor-core kernels.
#[must_use]
pub fn cases(effort: Effort) -> Vec<Case> {
    let mut cases = Vec::new();
    for backward in BACKWARDS {
        for dtype in [DType::BF16, DType::F16] {
            for (d, heads) in [
                (16, (4, 1)),
                (32, (8, 2)),
                (48, (5, 1)),
                (64, (3, 3)),
                (72, (1, 1)),
                (80, (2, 1)),
                (112, (2, 2)),
                (128, (7, 1)),
            ] {
                small_cases(&mut cases, dtype, d, heads, backward);
            }
        }
        for dtype in [DType::BF16, DType::F16] {
            for d in [64, 72, 80, 112] {
                grouped_case(&mut cases, dtype, d, backward);
            }
        }
        if effort == Effort::Gpu {
            large_cases(&mut cases, backward);
        }
    }
    for (dtype, d, heads) in [
        (DType::BF16, 16, (4, 1)),
        (DType::F16, 72, (1, 1)),
        (DType::BF16, 112, (2, 2)),
    ] {
        many_tiles(&mut cases, dtype, d, heads);
    }
    cases
}

/// Cases of the plain kernels.
#[must_use]
pub fn plain_cases(_effort: Effort) -> Vec<Case> {
    let mut cases = Vec::new();
    for (d, heads) in [
        (1, (4, 1)),
        (16, (1, 1)),
        (40, (2, 2)),
        (72, (7, 1)),
        (96, (1, 1)),
        (128, (2, 1)),
    ] {
        small_cases(&mut cases, DType::F32, d, heads, Split);
    }
    for dtype in [DType::BF16, DType::F16] {
        small_cases(&mut cases, dtype, 27, (2, 1), Split);
    }
    cases
}

fn small_cases(
    cases: &mut Vec<Case>,
    dtype: DType,
    d: usize,
    (h, g): (usize, usize),
    backward: AttentionBackward,
) {
    for causal in [true, false] {
        let name = move |what: &str| {
            format!(
                "attention {dtype} d {d}, {h}:{g} heads, {}, {what}{}",
                mask_name(causal),
                of(backward)
            )
        };
        let call = move |lengths: &[(usize, usize)], multiprocessors| Call {
            dtype,
            shape: shape(lengths, (h, g), d, causal),
            multiprocessors,
            backward,
        };
        cases.push(Case::new(name("equal lengths"), move |machine| {
            check_all(machine, &call(EQUAL, FEW))
        }));
        cases.push(Case::new(name("unequal lengths"), move |machine| {
            check_all(machine, &call(UNEQUAL, MANY))
        }));
        cases.push(Case::new(name("beside huge neighbours"), move |machine| {
            check_neighbours(machine, &call(&[(40, 70), (65, 65), (70, 40)], FEW))
        }));
    }
}

/// A case with so many query heads per key head that gradients come in parts.
fn grouped_case(cases: &mut Vec<Case>, dtype: DType, d: usize, backward: AttentionBackward) {
    let call = Call {
        dtype,
        shape: shape(&[(9, 9), (5, 70)], (7, 1), d, true),
        multiprocessors: MANY,
        backward,
    };
    let name = format!(
        "attention {dtype} d {d}, 7:1 heads in parts{}",
        of(backward)
    );
    cases.push(Case::new(name, move |machine| check_all(machine, &call)));
}

/// Cases of the fused backward with several tiles of keys, whose blocks take turns.
fn many_tiles(cases: &mut Vec<Case>, dtype: DType, d: usize, (h, g): (usize, usize)) {
    for causal in [true, false] {
        let lengths = [(70, 390), (200, 300), (150, 20), (129, 257)];
        let call = Call {
            dtype,
            shape: shape(&lengths, (h, g), d, causal),
            multiprocessors: FEW,
            backward: Fused,
        };
        let name = format!(
            "attention {dtype} d {d}, {h}:{g} heads, {}, many tiles of keys{}",
            mask_name(causal),
            of(Fused)
        );
        cases.push(Case::new(name, move |machine| check_all(machine, &call)));
    }
}

/// Checks the fused backward by a text of attention.cu, with three tiles of keys in one sequence and two in another. Returns the
/// gradients.
///
/// # Errors
/// A report of the machine, or a wrong value.
pub fn check_turns(machine: &mut dyn Machine, text: &str) -> Result<[Vec<f64>; 3]> {
    const KERNELS: &[&str] = &["forward_128", "output_products", "clear_words", "gradients"];
    let text = format!("#define TYPE 1\n#define HEAD_DIM 16\n{text}");
    let module = Module::foreign("turns", text, KERNELS);
    let call = Call {
        dtype: DType::BF16,
        shape: shape(&[(70, 300), (5, 140)], (2, 1), 16, true),
        multiprocessors: FEW,
        backward: Fused,
    };
    let values = call.draw(4);
    let got = call.run_from(machine, &values, Some(&module))?;
    check_values(&call, &values, &got)?;
    Ok(got.gradients())
}

/// Checks every element, and the bits of a second run.
fn check_all(machine: &mut dyn Machine, call: &Call) -> Result<()> {
    let values = call.draw(1);
    let got = call.run(machine, &values)?;
    check_values(call, &values, &got)?;
    call.run(machine, &values)?
        .ensure_equal(&got, "a second run")
}

/// Compares with the reference and with the rows that have error bounds.
fn check_values(call: &Call, values: &Values, got: &Results) -> Result<()> {
    let (shape, exact) = (
        &call.shape,
        Exact {
            shape: &call.shape,
            values,
            rounding: call.rounding(),
        },
    );
    let (out, lse) = shape.forward(&values.q, &values.k, &values.v);
    let (dq, dk, dv) = shape.backward((&values.q, &values.k, &values.v), &values.dout);
    let from = exact.statistics();
    let q_rows = || (0..shape.queries()).flat_map(|row| (0..shape.h).map(move |head| (row, head)));
    let k_rows = || (0..shape.keys()).flat_map(|key| (0..shape.g).map(move |head| (key, head)));

    let forward: Vec<_> = q_rows()
        .map(|(row, head)| exact.forward(row, head))
        .collect();
    let rows: Vec<Bounded> = forward.iter().map(|(row, _)| row.clone()).collect();
    compare("out", &got.out(), &out, &rows)?;
    for (at, (got, want)) in got.lse().iter().zip(&lse).enumerate() {
        let bound = from.lse[at].1;
        ensure!(
            got == want || (got - want).abs() <= bound,
            "lse {at} is {got} instead of {want}"
        );
    }
    let rows: Vec<Bounded> = q_rows()
        .map(|(row, head)| exact.gradient_q(row, head, &from))
        .collect();
    let [got_dq, got_dk, got_dv] = got.gradients();
    compare("dq", &got_dq, &dq, &rows)?;
    let rows: Vec<[Bounded; 2]> = k_rows()
        .map(|(key, head)| exact.gradient_kv(key, head, &from))
        .collect();
    let (dk_rows, dv_rows): (Vec<_>, Vec<_>) = rows.into_iter().map(|[dk, dv]| (dk, dv)).unzip();
    compare("dk", &got_dk, &dk, &dk_rows)?;
    compare("dv", &got_dv, &dv, &dv_rows)
}

/// Compares all rows with the reference.
fn compare(name: &str, got: &[f64], want: &[f64], rows: &[Bounded]) -> Result<()> {
    let bounds = rows.iter().flat_map(|row| row.want.iter().zip(&row.bound));
    ensure!(got.len() == want.len(), "{name} has {} elements", got.len());
    for (at, ((got, want), (same, bound))) in got.iter().zip(want).zip(bounds).enumerate() {
        let reference = 1e-9 * (1.0 + want.abs());
        ensure!(
            (same - want).abs() <= reference,
            "{name} {at}: the references differ, {same} {want}"
        );
        ensure!(
            (got - want).abs() <= *bound,
            "{name} {at} is {got} instead of {want}, off by more than {bound}"
        );
    }
    Ok(())
}

/// Checks that the middle sequence has the same bits alone and between sequences of huge values, in tiles of either
/// height.
fn check_neighbours(machine: &mut dyn Machine, call: &Call) -> Result<()> {
    const HUGE: f64 = 60_000.0;
    let shape = &call.shape;
    let mut values = call.draw(2);
    let middle = |starts: &[usize], row: usize| (starts[1] * row, starts[2] * row);
    let q = middle(&shape.q_starts, shape.h * shape.d);
    let k = middle(&shape.k_starts, shape.g * shape.d);
    let cut = |x: &mut Vec<f64>, (start, end): (usize, usize)| {
        let factor = if call.dtype == DType::F16 { HUGE } else { 1e30 };
        let huge = |x: &mut f64| *x = factor.copysign(*x);
        x[..start].iter_mut().for_each(huge);
        x[end..].iter_mut().for_each(huge);
        x[start..end].to_vec()
    };
    let one = Values {
        q: cut(&mut values.q, q),
        k: cut(&mut values.k, k),
        v: cut(&mut values.v, k),
        dout: cut(&mut values.dout, q),
    };
    let alone = Call {
        shape: Attention {
            q_starts: vec![0, shape.q_starts[2] - shape.q_starts[1]],
            k_starts: vec![0, shape.k_starts[2] - shape.k_starts[1]],
            ..shape.clone()
        },
        ..*call
    };
    let want = alone.run(machine, &one)?;
    check_values(&alone, &one, &want)?;
    for multiprocessors in [FEW, MANY] {
        let call = Call {
            multiprocessors,
            ..call.clone()
        };
        let packed = call.run(machine, &values)?.sequence(shape, 1);
        packed.ensure_equal(&want, "between neighbours")?;
    }
    Ok(())
}

/// Cases at sizes of real models.
fn large_cases(cases: &mut Vec<Case>, backward: AttentionBackward) {
    let sequence = |n: usize, count: usize| vec![(n, n); count];
    let all = [
        ("SigLIP, 10 slices", sequence(1024, 10), (16, 16), 72, false),
        (
            "the vision tower of CogVLM",
            sequence(1226, 1),
            (16, 16),
            112,
            false,
        ),
        ("a language model", sequence(4096, 1), (28, 4), 128, true),
    ];
    for (name, lengths, heads, d, causal) in all {
        for dtype in [DType::BF16, DType::F16] {
            let call = Call {
                dtype,
                shape: shape(&lengths, heads, d, causal),
                multiprocessors: 132,
                backward,
            };
            cases.push(Case::new(
                format!("attention {dtype}, {name}{}", of(backward)),
                move |machine| check_sampled(machine, &call),
            ));
        }
    }
}

/// Checks some rows of every head, and the bits of a second run. Gradients are compared with those of the kernel's own
/// forward.
fn check_sampled(machine: &mut dyn Machine, call: &Call) -> Result<()> {
    let values = call.draw(3);
    let got = call.run(machine, &values)?;
    let exact = Exact {
        shape: &call.shape,
        values: &values,
        rounding: call.rounding(),
    };
    let (out, lse) = (got.out(), got.lse());
    let from: Statistics = exact.statistics_of(&out, &lse);
    let [dq, dk, dv] = got.gradients();
    let (h, g, d) = (call.shape.h, call.shape.g, call.shape.d);
    let sample = |n: usize| [0, 1, n / 3, n / 2 + 1, n - 2, n - 1];
    let near = |name: &str, got: &[f64], at: usize, row: &Bounded| {
        let got = &got[at * d..][..d];
        compare(
            &format!("{name} row {at}"),
            got,
            &row.want,
            std::slice::from_ref(row),
        )
    };
    for row in sample(call.shape.queries()) {
        for head in 0..h {
            let at = row * h + head;
            let (want, (want_lse, bound)) = exact.forward(row, head);
            near("out", &out, at, &want)?;
            ensure!(
                (lse[at] - want_lse).abs() <= bound,
                "lse {at} is {} instead of {want_lse}",
                lse[at]
            );
            near("dq", &dq, at, &exact.gradient_q(row, head, &from))?;
        }
    }
    for key in sample(call.shape.keys()) {
        for head in 0..g {
            let [want_dk, want_dv] = exact.gradient_kv(key, head, &from);
            near("dk", &dk, key * g + head, &want_dk)?;
            near("dv", &dv, key * g + head, &want_dv)?;
        }
    }
    call.run(machine, &values)?
        .ensure_equal(&got, "a second run")
}
