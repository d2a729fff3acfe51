//! Tests of tiles of rows: the bits of a run without tiles, memory that does not grow with the inner width, and what is
//! refused.

use super::gradcheck::{backend, resident, spec, tensor, values};
use super::{Dropout, ResidentParams, Rows, Scope, Tape, Var};
use crate::SampleInput;
use crate::error::{ModelError, Result};
use crate::ops::{LinearLayer, LinearParams, LoraParams};
use engine::{ParamId, UnitId};
use kernels::{Backend, DType, Gelu, IGNORED_LABEL, MetaBackend, Tensor};
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Tokens of the tests: four stretches of 256 and less on the CPU, so tiles of 256, 512 and all rows.
const TOKENS: usize = 964;
const TILES: [usize; 5] = [1, 3, 7, 300, 963];
const WIDTH: usize = 12;
const INNER: usize = 20;
const RANK: usize = 3;

fn id(i: usize) -> ParamId {
    ParamId(i as u32)
}

/// A layer with the parameters from `first` on: weight, bias, A and B.
fn layer(first: usize, bias: bool, dropout: Option<f32>) -> LinearLayer {
    let adapter = dropout.map(|dropout| LoraParams {
        lora_a: id(first + 2),
        lora_b: id(first + 3),
        scale: 0.7,
        dropout,
        rows: Rows::Tokens,
        part: None,
    });
    let base = LinearParams::new(id(first), bias.then_some(id(first + 1)));
    LinearLayer { base, adapter }
}

/// Gate, up and down. Fused gate and up are rows of one weight; their adapters share one A.
fn layers(bias: bool, dropout: Option<f32>, fused: bool) -> [LinearLayer; 3] {
    let mut all = [0, 4, 8].map(|first| layer(first, bias, dropout));
    if fused {
        let gate = all[0].base.clone();
        for (i, layer) in all[..2].iter_mut().enumerate() {
            layer.base = gate.clone().with_rows(i * INNER..(i + 1) * INNER);
            let shared = |own: LoraParams| LoraParams {
                lora_a: id(2),
                lora_b: id(3),
                ..own
            };
            layer.adapter = layer.adapter.map(shared);
        }
    }
    all
}

fn params(fused: bool, trains: bool) -> Vec<(u32, Vec<usize>, bool)> {
    let rows = if fused { 2 * INNER } else { INNER };
    let own = |n: usize, k: usize| {
        let base = [(0, vec![n, k], trains), (0, vec![n], trains)];
        base.into_iter()
            .chain([(0, vec![RANK, k], true), (0, vec![n, RANK], true)])
    };
    let all = [own(rows, WIDTH), own(INNER, WIDTH), own(WIDTH, INNER)];
    all.into_iter().flatten().collect()
}

fn mlp(scope: &Scope<'_>, x: &Var, layers: &[LinearLayer; 3], gelu: bool) -> Result<Var> {
    let ids: Vec<ParamId> = layers.iter().flat_map(LinearLayer::ids).collect();
    let [gate, up, down] = layers.clone();
    scope.in_tiles(x, &ids, move |scope, x| {
        let inner = match gelu {
            true => scope.gelu(&up.forward(scope, x)?, Gelu::Erf)?,
            false => {
                let [gate, up] = LinearLayer::forward_all([&gate, &up], scope, x)?;
                scope.swiglu(&gate, &up)?
            }
        };
        down.forward(scope, &inner)
    })
}

fn dropout_of(t: usize) -> Dropout {
    let sample = SampleInput {
        input_ids: &vec![0; t],
        labels: &vec![IGNORED_LABEL; t],
        image_bounds: &[],
        slices: &[],
    };
    Dropout::new(5, &[3], &[sample], &*backend()).unwrap()
}

fn bits(x: &Tensor) -> Vec<u8> {
    x.to_bytes().unwrap()
}

/// Output, gradient of the input, and gradients of all parameters.
fn results(
    access: &ResidentParams,
    tile: Option<usize>,
    dtype: DType,
    stored: bool,
    run: impl Fn(&Scope<'_>, &Var) -> Result<Var>,
) -> Result<Vec<Vec<u8>>> {
    access.clear_grads();
    let store = |_| stored;
    let tape = Tape::training(access).with_recompute_check(true);
    let tape = tape.with_dropout(dropout_of(TOKENS)).with_stored(&store);
    let tape = tape.with_mlp_tiles(tile.and_then(NonZeroUsize::new));
    let on = tape.backend();
    let rows = |seed: usize| {
        let all = tensor(on, &[TOKENS, WIDTH], &values(seed, TOKENS * WIDTH));
        on.cast(&all, dtype).unwrap()
    };
    let x = tape.leaf(rows(3));
    let [y] = tape.segment(UnitId(0), [&x], |scope, [x]| Ok([run(scope, x)?]))?;
    let out = bits(y.value());
    let grads = tape.backward_from(&[(&y, rows(9))])?;
    let params = 0..access.spec().params.len();
    let params = params.map(|i| access.grad(id(i)).map_or(Vec::new(), |grad| bits(&grad)));
    let mut all = vec![out, bits(grads.get(&x).unwrap())];
    all.extend(params);
    Ok(all)
}

fn access_of(params: &[(u32, Vec<usize>, bool)], dtype: DType) -> ResidentParams {
    let params = params.iter();
    let params: Vec<(u32, &[usize], bool)> = params.map(|(u, s, t)| (*u, &**s, *t)).collect();
    let access = resident(&spec(&params));
    for i in 0..params.len() {
        let weight = access.weight(id(i));
        access.set_weight(id(i), backend().cast(&weight, dtype).unwrap());
    }
    access
}

#[test]
fn tiles_have_the_bits_of_all_rows_at_once() {
    for (bias, dropout, fused, trains, gelu, dtype) in [
        (true, None, false, true, false, DType::F32),
        (true, None, false, true, true, DType::BF16),
        (false, None, true, true, false, DType::BF16),
        (false, Some(0.4), false, false, false, DType::BF16),
        (true, Some(0.0), true, false, false, DType::F32),
        (true, Some(0.4), true, true, false, DType::BF16),
        (true, Some(0.4), false, true, true, DType::F32),
        (true, None, false, false, false, DType::BF16),
    ] {
        let access = access_of(&params(fused, trains), dtype);
        let layers = layers(bias, dropout, fused);
        let run = |tile: Option<usize>, stored: bool| {
            let run = |scope: &Scope<'_>, x: &Var| mlp(scope, x, &layers, gelu);
            results(&access, tile, dtype, stored, run).unwrap()
        };
        let whole = run(None, false);
        for tile in TILES {
            let case = (bias, dropout, fused, trains, gelu, dtype, tile);
            assert!(run(Some(tile), false) == whole, "{case:?}");
        }
        assert!(run(Some(1), true) == whole, "stored, {dtype}");
        let got = whole[2..].iter().filter(|grad| !grad.is_empty()).count();
        let sums = [trains, dropout.is_some()].into_iter().any(|some| some);
        assert_eq!(got > 0, sums, "gradients of parameters");
    }
}

/// Peak bytes of a pass over `tokens` rows, beside the weights.
fn peak(tokens: usize, inner: usize, tile: Option<usize>) -> u64 {
    let on: Arc<dyn Backend> = Arc::new(MetaBackend::unlimited());
    let spec = spec(&[
        (0, &[inner, WIDTH], false),
        (0, &[inner, WIDTH], false),
        (0, &[WIDTH, inner], false),
        (0, &[WIDTH], true),
    ]);
    let tensors = spec.params.iter();
    let tensors = tensors.map(|p| tensor(&*on, p.shape.dims(), &vec![0.0; p.shape.elems()]));
    let access = ResidentParams::new(on.clone(), spec.clone(), tensors.collect()).unwrap();
    let before = on.pool().stats().in_use;
    let tape = Tape::training(&access).with_mlp_tiles(tile.and_then(NonZeroUsize::new));
    let x = tape.leaf(tensor(&*on, &[tokens, WIDTH], &vec![0.0; tokens * WIDTH]));
    let [y] = tape
        .segment(UnitId(0), [&x], |scope, [x]| {
            let layers = [0, 1, 2].map(|i| LinearLayer {
                base: LinearParams::new(id(i), (i == 2).then_some(id(3))),
                adapter: None,
            });
            Ok([mlp(scope, x, &layers, false)?])
        })
        .unwrap();
    let seed = tensor(&*on, &[tokens, WIDTH], &vec![0.0; tokens * WIDTH]);
    drop(tape.backward_from(&[(&y, seed)]).unwrap());
    on.pool().stats().peak - before
}

#[test]
fn memory_of_tiles_grows_neither_with_the_inner_width_nor_with_the_rows() {
    let (rows, inner, tile) = (8192, 640, 256);
    let all = rows * inner * 4;
    let growth = |tile| peak(rows, 2 * inner, tile) - peak(rows, inner, tile);
    assert!(growth(None) >= 5 * all as u64, "{}", growth(None));
    // Gate, up, their product, and the gradients of the three, for one tile; and workspace of its products.
    let most = 8 * tile * inner * 4;
    assert!(growth(Some(tile)) <= most as u64, "{}", growth(Some(tile)));
    let more = peak(2 * rows, inner, Some(tile)) - peak(rows, inner, Some(tile));
    // Input, output, their gradients, and one copy that is passed on.
    assert!(more <= 6 * (rows * WIDTH * 4) as u64, "{more}");
}

#[test]
fn a_tile_with_another_sum_over_rows_is_refused() {
    let access = access_of(&[(0, vec![WIDTH], true)], DType::F32);
    let run = |tile: Option<usize>| {
        results(&access, tile, DType::F32, false, |scope, x| {
            scope.in_tiles(x, &[id(0)], |scope, x| scope.rms_norm(x, id(0), 1e-6))
        })
    };
    assert!(run(None).is_ok());
    assert!(matches!(run(Some(1)), Err(ModelError::NotInTiles)));
}
