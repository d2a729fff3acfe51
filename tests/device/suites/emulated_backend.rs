//! The CUDA backend on the emulated device: every operation of the trait compared with the CPU.

use device_tests::emulator::Order;
use device_tests::executor::{
    EmulatedGpu, Library, emulated_backend, emulated_backend_with, with_graphs,
};
use device_tests::numbers::bytes;
use device_tests::random::Operands;
use kernels::cuda::CudaBackend;
use kernels::cuda::backend::Executor as _;
use kernels::cuda::backend::LossCuts;
use kernels::cuda::backend::graphs::Mode;
use kernels::cuda::device_kind::AttentionBackward;
use kernels::{
    AdaptedLayer, AdaptedLinearArgs, AdaptedLinearGradArgs, AdapterArgs, AdapterDropout,
    AttentionArgs, Backend, CpuBackend, DType, KernelError, MatmulArgs, MetaBackend, Shape,
    SumPart, Tag, Tensor, Transpose,
};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

const ARENA_BYTES: u64 = 64 << 20;

/// Runs the checks whose number modulo `parts` is `part`, so that tests run in parallel.
fn run(part: usize, parts: usize) -> kernels::Result<()> {
    run_on(
        &emulated_backend(ARENA_BYTES, Order::Ascending)?,
        part,
        parts,
    )
}

fn run_on(device: &CudaBackend, part: usize, parts: usize) -> kernels::Result<()> {
    let checks = kernels::verify::all();
    let own = checks.iter().skip(part).step_by(parts);
    let failures: Vec<String> = own
        .filter_map(|check| check.run(device).err())
        .map(|error| format!("{error}"))
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    // Only the table of the last attention remains.
    let left = device.pool().stats().in_use;
    assert!(left < 4096, "{left} bytes are left");
    Ok(())
}

#[test]
fn even_numbered_operations_agree_with_the_cpu() -> kernels::Result<()> {
    run(0, 2)
}

#[test]
fn odd_numbered_operations_agree_with_the_cpu() -> kernels::Result<()> {
    run(1, 2)
}

/// Threads that share a backend queue commands alternately. State that one thread has prepared and not yet queued must
/// survive.
#[test]
fn operations_of_two_threads_agree_with_the_cpu() -> kernels::Result<()> {
    let device = &emulated_backend(ARENA_BYTES, Order::Ascending)?;
    std::thread::scope(|scope| {
        for part in 0..2 {
            scope.spawn(move || {
                let checks = kernels::verify::all();
                let attention = checks
                    .iter()
                    .filter(|check| check.name.starts_with("attention"));
                // The two threads never run the same check at once.
                let order = attention.cycle().skip(part).step_by(2);
                for check in order.take(40) {
                    check
                        .run(device)
                        .unwrap_or_else(|error| panic!("{}: {error}", check.name));
                }
            });
        }
    });
    Ok(())
}

/// Large uploads, such as images and weights, overlap with compute, and later commands see them. Small tables go
/// through the queue.
#[test]
fn large_uploads_overlap_with_compute() -> kernels::Result<()> {
    let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
    let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?;
    let uploaded = |elems: usize| -> kernels::Result<usize> {
        let before = gpu.uploads().bytes;
        let values: Vec<f32> = (0..elems).map(|i| i as f32).collect();
        let shape = Shape::new(&[elems]);
        let bytes = bytemuck::cast_slice(&values);
        let x = device.upload(bytes, shape, DType::F32, Tag::Activations)?;
        let doubled = device.add(&x, &x)?.to_f32_vec()?;
        assert!(doubled.iter().zip(&values).all(|(y, x)| *y == 2.0 * x));
        Ok((gpu.uploads().bytes - before) as usize)
    };
    assert_eq!(uploaded(1 << 18)?, 4 << 18);
    assert_eq!(uploaded(1000)?, 0);
    Ok(())
}

/// All operations again, since most use a library product.
#[test]
fn operations_agree_with_the_cpu_through_a_library() -> kernels::Result<()> {
    let gpu = EmulatedGpu::new(Order::Ascending).with_library(Library::Multiplies);
    let gpu = Arc::new(gpu);
    run_on(&CudaBackend::new(gpu.clone(), ARENA_BYTES)?, 0, 1)?;
    assert!(gpu.multiplied() > 50, "{} products", gpu.multiplied());
    Ok(())
}

/// Attention with the fused backward. Its scratch memory, of several tiles of keys, is what the plan's executor counts, and
/// not that of the split backward.
#[test]
fn the_fused_backward_of_attention_agrees_with_the_cpu() -> kernels::Result<()> {
    let gpu = |backward| EmulatedGpu::new(Order::Ascending).with_attention_backward(backward);
    let device = CudaBackend::new(Arc::new(gpu(AttentionBackward::Fused)), ARENA_BYTES)?;
    let checks = kernels::verify::all();
    let attention = checks
        .iter()
        .filter(|check| check.name.starts_with("attention"));
    for check in attention {
        check
            .run(&device)
            .unwrap_or_else(|error| panic!("{}: {error}", check.name));
    }
    let peak = |backward| -> kernels::Result<u64> {
        let gpu = gpu(backward);
        let counting = CudaBackend::counting(gpu.kind());
        let device = CudaBackend::new(Arc::new(gpu), ARENA_BYTES)?;
        attention_backward(&device)?;
        attention_backward(&counting)?;
        let [ran, planned] = [device, counting].map(|device| device.pool().stats().peak);
        assert_eq!(ran, planned);
        Ok(planned)
    };
    assert!(peak(AttentionBackward::Fused)? > peak(AttentionBackward::Split)?);
    Ok(())
}

/// A backward of attention in bf16 with three tiles of keys.
fn attention_backward(device: &CudaBackend) -> kernels::Result<()> {
    let zeros = |rows| device.zeros(Shape::new(&[rows, 2, 64]), DType::BF16, Tag::Activations);
    let (q, k) = (zeros(300)?, zeros(300)?);
    let args = AttentionArgs {
        q: &q,
        k: &k,
        v: &k,
        q_starts: &[0, 300],
        k_starts: &[0, 300],
        causal: true,
        scale: 0.125,
    };
    let saved = device.attention(args)?;
    device.attention_backward(args, &saved, &q)?;
    Ok(())
}

/// A library computes the wide products of adapted layers where it is chosen for them.
#[test]
fn adapted_layers_agree_with_the_cpu_through_a_library() -> kernels::Result<()> {
    let multiplied = |library| -> kernels::Result<u64> {
        let gpu = Arc::new(EmulatedGpu::new(Order::Ascending).with_library(library));
        let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?;
        let checks = kernels::verify::all();
        let layers = checks
            .iter()
            .filter(|check| check.name.starts_with("adapted layer of"));
        for check in layers {
            if let Err(error) = check.run(&device) {
                panic!("{error}");
            }
        }
        Ok(gpu.multiplied())
    };
    let [without, with] = [
        multiplied(Library::Multiplies)?,
        multiplied(Library::Adapts)?,
    ];
    assert!(
        with > without + 10,
        "{with} products, {without} without adapted layers"
    );
    Ok(())
}

/// If the library refuses, results have the bits of our own kernels, and the scratch memory is large enough for them.
#[test]
fn products_that_a_library_refuses_have_the_bits_of_our_kernels() -> kernels::Result<()> {
    let backends = [Library::Absent, Library::Refuses]
        .map(|library| emulated_backend_with(ARENA_BYTES, Order::Ascending, library));
    let [own, refused] = backends.map(|backend| backend.unwrap());
    let [a, b, bias] = [(19, 4096), (24, 4096), (1, 24)].map(|(rows, columns)| {
        let values = Operands::new(3).normal("product", rows * columns, 1.0);
        (bytes(DType::BF16, &values), Shape::new(&[rows, columns]))
    });
    let products: Vec<Vec<u8>> = [own, refused]
        .iter()
        .map(|device| {
            let upload = |(bytes, shape): &(Vec<u8>, Shape)| {
                device.upload(bytes, *shape, DType::BF16, Tag::Activations)
            };
            let args = MatmulArgs {
                a: &upload(&a)?,
                transpose_a: Transpose::No,
                b: &upload(&b)?,
                transpose_b: Transpose::Yes,
                bias: Some(&upload(&bias)?.reshape([24])?),
                out: DType::BF16,
            };
            let y = device.matmul(args)?;
            let scratch = device.pool().stats().by_tag;
            assert!(scratch.iter().any(|tag| tag.peak > 0));
            y.to_bytes()
        })
        .collect::<kernels::Result<_>>()?;
    assert!(products[0] == products[1]);
    Ok(())
}

/// Chunks of a loss add to the weight's gradient inside the library's product.
#[test]
fn losses_in_chunks_agree_with_the_cpu_through_a_library() -> kernels::Result<()> {
    losses_in_small_pieces(Library::Multiplies)
}

#[test]
fn losses_in_chunks_agree_with_the_cpu_where_a_library_refuses() -> kernels::Result<()> {
    losses_in_small_pieces(Library::Refuses)
}

#[test]
fn losses_in_chunks_agree_with_the_cpu() -> kernels::Result<()> {
    losses_in_small_pieces(Library::Absent)
}

fn losses_in_small_pieces(library: Library) -> kernels::Result<()> {
    let cuts = LossCuts {
        logits: 80,
        weight_rows: 16,
    };
    let device = emulated_backend_with(ARENA_BYTES, Order::Descending, library)?;
    let device = device.with_loss_cuts(cuts);
    let checks = kernels::verify::all();
    let losses: Vec<_> = checks
        .iter()
        .filter(|check| check.name.starts_with("loss"))
        .collect();
    assert!(!losses.is_empty());
    let failures: Vec<_> = losses
        .iter()
        .filter_map(|check| check.run(&device).err())
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
    Ok(())
}

/// Rows of the feed-forward layers, of the stretches and of a tile of two of them. The last stretch is shorter.
const ROWS: usize = 90;
const STRETCH: usize = 32;
const TILE: usize = 64;
const WIDTH: usize = 256;
const INNER: usize = 24;

/// Operands of a feed-forward layer's products on a device.
struct Layer {
    x: Tensor,
    dy: [Tensor; 2],
    weight: Tensor,
    bias: Tensor,
    adapters: [[Tensor; 2]; 2],
    names: Tensor,
}

impl Layer {
    fn new(on: &dyn Backend, dtype: DType) -> kernels::Result<Self> {
        let tensor = |name: &str, shape: &[usize]| {
            let values = Operands::new(11).normal(name, shape.iter().product(), 1.0);
            on.upload(
                &bytes(dtype, &values),
                Shape::new(shape),
                dtype,
                Tag::Parameters,
            )
        };
        let names: Vec<i32> = (0..2 * ROWS as i32).collect();
        let adapter = |name: &str, rank: usize| -> kernels::Result<[Tensor; 2]> {
            Ok([
                tensor(&format!("{name} a"), &[rank, WIDTH])?,
                tensor(&format!("{name} b"), &[INNER, rank])?,
            ])
        };
        Ok(Self {
            x: tensor("x", &[ROWS, WIDTH])?,
            dy: [
                tensor("dy", &[ROWS, INNER])?,
                tensor("other", &[ROWS, INNER])?,
            ],
            weight: tensor("weight", &[INNER, WIDTH])?,
            bias: tensor("bias", &[INNER])?,
            adapters: [adapter("first", 4)?, adapter("second", 3)?],
            names: on.upload(
                bytemuck::cast_slice(&names),
                Shape::new(&[ROWS, 2]),
                DType::I32,
                Tag::Parameters,
            )?,
        })
    }

    /// Results for each row, then sums over all rows, of products computed in these tiles. `dropout` has the probability
    /// of each of two adapters; `None` for a layer without one.
    fn results(
        &self,
        on: &dyn Backend,
        tiles: &[Range<usize>],
        dropout: [Option<f32>; 2],
    ) -> kernels::Result<Vec<Vec<u8>>> {
        let (mut rows, mut sums) = (vec![Vec::new(); 5], (None, None, Vec::new()));
        for tile in tiles {
            let part = SumPart {
                first: tile.start,
                total: ROWS,
            };
            let own = |x: &Tensor| x.narrow(tile.start, tile.len());
            let (x, names) = (own(&self.x)?, own(&self.names)?);
            let dy = [own(&self.dy[0])?, own(&self.dy[1])?];
            let forward = MatmulArgs {
                a: &x,
                transpose_a: Transpose::No,
                b: &self.weight,
                transpose_b: Transpose::Yes,
                bias: Some(&self.bias),
                out: x.dtype(),
            };
            let input_gradient = MatmulArgs {
                a: &dy[0],
                transpose_b: Transpose::No,
                bias: None,
                ..forward
            };
            let gradient = MatmulArgs {
                a: &dy[0],
                transpose_a: Transpose::Yes,
                b: &x,
                out: DType::F32,
                ..input_gradient
            };
            let layer = |i: usize| AdaptedLayer {
                weight: &self.weight,
                bias: Some(&self.bias),
                adapter: dropout[i].map(|p| AdapterArgs {
                    lora_a: &self.adapters[i][0],
                    lora_b: &self.adapters[i][1],
                    scale: 0.5,
                    dropout: (p > 0.0).then_some(AdapterDropout {
                        rows: &names,
                        key: [1, 2],
                        p,
                    }),
                }),
            };
            let projections = [0, 1].map(|i| vec![layer(i)]);
            let adapted = AdaptedLinearArgs {
                x: &x,
                row_groups: None,
                projections: &projections,
            };
            let y = on.adapted_linear(adapted)?;
            let dy_of = dy.each_ref();
            let args = AdaptedLinearGradArgs {
                forward: adapted,
                dy: &dy_of,
                inner: &y.inner,
                need_dx: true,
            };
            let grads = match tiles {
                [_] => on.adapted_linear_backward(args)?,
                _ => on.adapted_linear_backward_part(args, std::mem::take(&mut sums.2), part)?,
            };
            sums = match tiles {
                [_] => (
                    Some(on.matmul(gradient)?),
                    Some(on.column_sum(&dy[0])?),
                    grads.adapters,
                ),
                _ => (
                    Some(on.matmul_part(gradient, sums.0.take(), part)?),
                    Some(on.column_sum_part(&dy[0], sums.1.take(), part)?),
                    grads.adapters,
                ),
            };
            let own = [
                on.matmul(forward)?,
                on.matmul(input_gradient)?,
                y.y[0].clone(),
                y.y[1].clone(),
                grads.dx.expect("it was requested"),
            ];
            for (all, own) in rows.iter_mut().zip(own) {
                all.extend(own.to_bytes()?);
            }
        }
        let adapters = sums.2.into_iter().flatten().flatten().flatten();
        let sums = [sums.0, sums.1].into_iter().flatten().chain(adapters);
        rows.extend(
            sums.map(|sum| sum.to_bytes())
                .collect::<kernels::Result<Vec<_>>>()?,
        );
        Ok(rows)
    }
}

/// What was counted since `before`.
fn more(before: &BTreeMap<String, u64>, mut now: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    for (key, count) in &mut now {
        *count -= before.get(key).copied().unwrap_or(0);
    }
    now.retain(|_, count| *count > 0);
    now
}

/// Feed-forward layers have the bits of all rows at once in tiles of one stretch and of two. A library gets the same products.
#[test]
fn tiles_of_stretches_have_the_bits_of_all_rows() -> kernels::Result<()> {
    let tiles = |step: usize| -> Vec<Range<usize>> {
        let firsts = (0..ROWS).step_by(step);
        firsts.map(|first| first..ROWS.min(first + step)).collect()
    };
    for library in [
        Library::Absent,
        Library::Multiplies,
        Library::Adapts,
        Library::Refuses,
    ] {
        let gpu = Arc::new(EmulatedGpu::new(Order::Ascending).with_library(library));
        let device = CudaBackend::new(gpu.clone(), ARENA_BYTES)?.with_stretch(STRETCH);
        let on = device.feed_forward().expect("a GPU has stretches");
        for (dtype, dropout) in [
            (DType::F32, [Some(0.0), Some(0.0)]),
            (DType::BF16, [Some(0.0), Some(0.0)]),
            (DType::BF16, [Some(0.3), Some(0.3)]),
            (DType::BF16, [Some(0.3), Some(0.0)]),
            (DType::F16, [Some(0.3), None]),
        ] {
            let operands = Layer::new(&device, dtype)?;
            let before = gpu.products();
            let whole = operands.results(on, &tiles(ROWS), dropout)?;
            let products = more(&before, gpu.products());
            for step in [STRETCH, TILE] {
                let before = gpu.products();
                let tiled = operands.results(on, &tiles(step), dropout)?;
                assert_eq!(more(&before, gpu.products()), products);
                let same: Vec<bool> = tiled.iter().zip(&whole).map(|(a, b)| a == b).collect();
                assert!(
                    same.iter().all(|same| *same) && tiled.len() == whole.len(),
                    "{library:?}, {dtype}, {dropout:?}, tiles of {step}: {same:?}"
                );
            }
            // Elsewhere a sum over rows is one product, and it has other bits.
            let plain = operands.results(&device, &tiles(ROWS), dropout)?;
            assert!(plain != whole, "{library:?}, {dtype}, {dropout:?}");
        }
    }
    Ok(())
}

/// Some small operations on a tensor, as in a model whose device waits for launches.
fn commands(device: &dyn Backend, rows: usize, first: f32) -> kernels::Result<Vec<u8>> {
    let values: Vec<f32> = (0..rows * 8).map(|i| i as f32 * 0.01 + first).collect();
    let shape = Shape::new(&[rows, 8]);
    let bytes = bytemuck::cast_slice(&values);
    let x = device.upload(bytes, shape, DType::F32, Tag::Activations)?;
    let mut y = device.zeros(shape, DType::F32, Tag::Activations)?;
    for _ in 0..6 {
        y = device.add(&device.scale(&y, 0.5)?, &x)?;
    }
    y.to_bytes()
}

/// A repeated run is replayed with the new values. A run of another shape is not.
#[test]
fn a_repeated_run_is_replayed_as_a_graph() -> kernels::Result<()> {
    let alone = emulated_backend(1 << 20, Order::Ascending)?;
    let gpu = Arc::new(EmulatedGpu::new(Order::Ascending));
    let (device, graphs) = with_graphs(gpu, 1 << 20, Mode::Auto)?;
    let same = |rows, first| -> kernels::Result<()> {
        let (got, want) = (
            commands(&device, rows, first)?,
            commands(&alone, rows, first)?,
        );
        assert!(got == want, "{rows} rows from {first}");
        Ok(())
    };
    same(4, 1.0)?;
    assert_eq!(graphs.counts().replays, 0);
    same(4, 2.0)?;
    let counts = graphs.counts();
    assert_eq!((counts.graphs, counts.replays, counts.replayed), (1, 1, 13));
    same(5, 2.0)?;
    same(4, 3.0)?;
    let counts = graphs.counts();
    assert_eq!(
        (counts.graphs, counts.replays, counts.commands),
        (1, 2, 4 * 13)
    );
    Ok(())
}

/// All operations twice. The second time is a replay of the first wherever offsets agree.
#[test]
fn operations_agree_with_the_cpu_in_graphs() -> kernels::Result<()> {
    let gpu = EmulatedGpu::new(Order::Descending).with_library(Library::Multiplies);
    let (device, graphs) = with_graphs(Arc::new(gpu), ARENA_BYTES, Mode::On)?;
    run_on(&device, 0, 3)?;
    run_on(&device, 0, 3)?;
    assert!(graphs.counts().replays > 10, "{:?}", graphs.counts());
    Ok(())
}

#[test]
fn operands_of_other_devices_are_refused() {
    let device = emulated_backend(1 << 20, Order::Ascending).unwrap();
    let other = emulated_backend(1 << 20, Order::Ascending).unwrap();
    let upload = |backend: &dyn Backend| {
        let bytes = [0; 16];
        let shape = Shape::new(&[4]);
        backend
            .upload(&bytes, shape, DType::F32, Tag::Activations)
            .unwrap()
    };
    let own = upload(&device);
    for strange in [upload(&CpuBackend::unlimited()), upload(&other)] {
        let error = device.add(&own, &strange).unwrap_err();
        assert!(
            matches!(error, KernelError::Elsewhere { op: "add", .. }),
            "{error}"
        );
    }
    let error = device
        .add(&own, &upload(&MetaBackend::unlimited()))
        .unwrap_err();
    assert!(matches!(error, KernelError::NoValues { .. }), "{error}");
    let error = CpuBackend::unlimited().add(&own, &own).unwrap_err();
    assert!(matches!(error, KernelError::Elsewhere { .. }), "{error}");
}

#[test]
fn allocations_beyond_the_arena_are_errors() {
    let device = emulated_backend(1 << 20, Order::Ascending).unwrap();
    let zeros = |bytes: usize| device.zeros(Shape::new(&[bytes]), DType::U8, Tag::Activations);
    let half = zeros(1 << 19).unwrap();
    let error = zeros((1 << 19) + 1).unwrap_err();
    assert!(matches!(error, KernelError::OutOfMemory { .. }), "{error}");
    let other = zeros(1 << 19).unwrap();
    drop(half);
    // As large as the free memory.
    let again = zeros(1 << 19).unwrap();
    assert!(again.to_bytes().unwrap().iter().all(|b| *b == 0));
    drop((other, again));
    let block = device.pool().take(64, Tag::Activations).unwrap_err();
    assert!(matches!(block, KernelError::Elsewhere { .. }), "{block}");
    assert_eq!(device.pool().stats().in_use, 0);
}
