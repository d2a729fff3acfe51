//! Quantized weights beside what bitsandbytes made of the same values.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of a test binary"
)]

use kernels::{Backend, Codebook, CpuBackend, DType, Quantization, Shape, Tag, quantized};
use models::{WeightError, WeightSource};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Units in the last place by which a mean of magnitudes may differ: the package adds them in another order.
const MEAN_ULPS: u32 = 2;

fn near(found: f32, wanted: f32) -> bool {
    found.to_bits().abs_diff(wanted.to_bits()) <= MEAN_ULPS
}

fn stored(file: &str) -> Vec<u8> {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests");
    std::fs::read(tests.join(file)).unwrap()
}

fn golden(file: &str) -> Vec<u8> {
    stored(&format!("fixtures/quantized/{file}"))
}

fn cases(file: &str) -> Vec<Value> {
    let value: Value = serde_json::from_slice(&golden(file)).unwrap();
    value["cases"].as_array().unwrap().clone()
}

fn text<'v>(case: &'v Value, key: &str) -> &'v str {
    case[key].as_str().unwrap()
}

/// Values of a tensor of any float dtype.
fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = file.tensor(name).unwrap();
    let dtype = DType::from_name(&format!("{:?}", view.dtype())).unwrap();
    let shape = Shape::new(&[view.data().len() / dtype.size_bytes()]);
    let cpu = CpuBackend::unlimited();
    let tensor = cpu.upload(view.data(), shape, dtype, Tag::Activations);
    tensor.unwrap().to_f32_vec().unwrap()
}

fn shape_of(case: &Value) -> Shape {
    let dims = case["shape"].as_array().unwrap().iter();
    let dims: Vec<usize> = dims.map(|dim| dim.as_u64().unwrap() as usize).collect();
    Shape::new(&dims)
}

/// Bits, with one bit pattern for both zeros.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| (value + 0.0).to_bits()).collect()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    let words = bytes.chunks_exact(4);
    let words = words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    words.collect()
}

fn dequantized(
    quantized: &[u8],
    quantization: Quantization,
    shape: Shape,
    dtype: DType,
) -> Vec<f32> {
    let cpu = CpuBackend::unlimited();
    let bytes = Shape::new(&[quantized.len()]);
    let quantized = cpu.upload(quantized, bytes, DType::U8, Tag::Parameters);
    let dense = cpu
        .dequantize(&quantized.unwrap(), quantization, shape, dtype)
        .unwrap();
    dense.to_f32_vec().unwrap()
}

#[test]
fn tables_are_those_of_bitsandbytes() {
    let bytes = golden("maps.safetensors");
    let maps = SafeTensors::deserialize(&bytes).unwrap();
    for (name, values) in [
        ("nf4", &Codebook::Nf4.values()[..]),
        ("fp4", &Codebook::Fp4.values()[..]),
        ("dynamic_signed", &quantized::nested_values()[..]),
    ] {
        assert_eq!(bits(values), bits(&floats(&maps, name)), "{name}");
    }
}

#[test]
fn four_bit_weights_equal_those_of_bitsandbytes() {
    let bytes = golden("tensors_4bit.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let cases = cases("tensors_4bit.json");
    assert!(cases.len() > 40);
    for case in &cases {
        let (key, shape) = (text(case, "key"), shape_of(case));
        let double = case["nested"].as_bool().unwrap();
        let codebook = match text(case, "quant_type") {
            "nf4" => Codebook::Nf4,
            _ => Codebook::Fp4,
        };
        let quantization = Quantization::FourBit {
            codebook,
            block_elems: case["blocksize"].as_u64().unwrap() as u32,
            double,
        };
        let input = floats(&file, &format!("{}.input", text(case, "case")));
        let mut quantized = vec![0; quantization.bytes(shape)];
        quantization.quantize(&input, shape, &mut quantized);
        let parts = quantization.parts(shape);
        let plain = key.trim_end_matches(".nested");
        let codes = |name: &str| file.tensor(&format!("{plain}.{name}")).ok();
        let package = codes("codes").unwrap();
        let kernel = codes("codes_kernel").unwrap_or_else(|| package.clone());
        let both = package.data().iter().zip(kernel.data());
        for (i, (found, (package, kernel))) in
            quantized[parts.codes.clone()].iter().zip(both).enumerate()
        {
            for nibble in [0xf0, 0x0f] {
                let of = |byte: &u8| byte & nibble;
                let is_known = [of(package), of(kernel)].contains(&of(found));
                assert!(is_known, "{key}: byte {i} is {found:02x}");
            }
        }
        // Magnitudes and values follow from the package's codes, which other rules than ours may have chosen.
        quantized[parts.codes.clone()].copy_from_slice(package.data());
        let wanted = |name: &str| file.tensor(&format!("{key}.{name}")).ok();
        if double {
            assert_eq!(
                &quantized[parts.magnitudes.clone()],
                wanted("absmax").unwrap().data(),
                "{key}"
            );
            let nested = f32s(&quantized[parts.nested.clone()]);
            let offset = case["offset"].as_f64().unwrap() as f32;
            let found = f32s(&quantized[parts.offset.clone()])[0];
            assert!(
                near(found, offset),
                "{key}: offset {found} instead of {offset}"
            );
            quantized[parts.offset.clone()].copy_from_slice(&offset.to_le_bytes());
            let name = format!("{key}.nested_absmax");
            let nested_wanted = floats(&file, &name);
            for (found, wanted) in nested.iter().zip(&nested_wanted) {
                // A scale is a magnitude less the mean.
                assert!(
                    near(found + offset, wanted + offset),
                    "{key}: scale {found} instead of {wanted}"
                );
            }
            let scales = file.tensor(&name).unwrap();
            quantized[parts.nested.clone()].copy_from_slice(scales.data());
        } else {
            let name = format!("{key}.absmax");
            assert_eq!(
                bits(&f32s(&quantized[parts.magnitudes.clone()])),
                bits(&floats(&file, &name)),
                "{key}"
            );
        }
        for (name, dtype) in [
            ("dequant_f32", DType::F32),
            ("dequant_bf16", DType::BF16),
            ("dequant_f16", DType::F16),
        ] {
            if wanted(name).is_some() {
                let found = dequantized(&quantized, quantization, shape, dtype);
                let values = floats(&file, &format!("{key}.{name}"));
                assert_eq!(bits(&found), bits(&values), "{key}.{name}");
            }
        }
    }
}

#[test]
fn int8_weights_equal_those_of_bitsandbytes() {
    let bytes = golden("int8.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for case in cases("int8.json") {
        let (name, shape, quantization) =
            (text(&case, "case"), shape_of(&case), Quantization::Int8);
        let input = floats(&file, &format!("{name}.weight"));
        let mut quantized = vec![0; quantization.bytes(shape)];
        quantization.quantize(&input, shape, &mut quantized);
        let parts = quantization.parts(shape);
        let codes = file.tensor(&format!("{name}.CB")).unwrap();
        assert_eq!(&quantized[parts.codes], codes.data(), "{name}");
        let scales = floats(&file, &format!("{name}.SCB"));
        assert_eq!(f32s(&quantized[parts.magnitudes]), scales, "{name}");
        let found = dequantized(&quantized, quantization, shape, DType::F32);
        let values = floats(&file, &format!("{name}.dequant_f32"));
        assert_eq!(bits(&found), bits(&values), "{name}");
    }
}

/// The bits of a large weight on one thread and on several.
#[test]
fn threads_do_not_change_quantized_weights() {
    let shape = Shape::new(&[611, 320]);
    let values: Vec<f32> = (0..shape.elems())
        .map(|i| ((i * 2_654_435_761) % 65_521) as f32 / 32_768.0 - 1.0)
        .collect();
    for quantization in [
        Quantization::four_bit(Codebook::Nf4, true),
        Quantization::four_bit(Codebook::Fp4, false),
        Quantization::Int8,
    ] {
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| {
                let mut quantized = vec![0; quantization.bytes(shape)];
                quantization.quantize(&values, shape, &mut quantized);
                let dense = dequantized(&quantized, quantization, shape, DType::BF16);
                (quantized, bits(&dense))
            })
        };
        assert_eq!(on(1), on(3), "{quantization}");
    }
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A quantized weight of the pack, as the only one of a file.
fn one_weight(pack: &str, module: &str) -> Tensors {
    let bytes = stored(&format!("golden/{pack}/model.safetensors"));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let own = file.iter().filter(|(name, _)| name.starts_with(module));
    let own = own.map(|(name, view)| {
        let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        (name.to_owned(), tensor)
    });
    own.collect()
}

fn open(tensors: &Tensors) -> Result<WeightSource, WeightError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    WeightSource::open_file(&path)
}

#[test]
fn ranges_of_quantized_weights_are_those_of_the_whole() {
    for (pack, double) in [
        ("glm-4.1v-nf4", true),
        ("glm-4.1v-nf4-decoder", false),
        ("glm-4.1v-int8", false),
    ] {
        let tensors = one_weight(pack, "model.language_model.layers.0.mlp.down_proj");
        let source = open(&tensors).unwrap();
        let names: Vec<&str> = source.names().collect();
        assert_eq!(names.len(), 1, "{pack}: {names:?}");
        let elems: usize = source.shape(names[0]).unwrap().iter().product();
        let whole = source.read(names[0], DType::BF16).unwrap();
        for range in [0..1, 63..65, 1..elems, 70..140, elems - 1..elems] {
            let mut part = vec![0; 2 * range.len()];
            let read = source.read_range(names[0], range.clone(), DType::BF16, &mut part);
            read.unwrap();
            assert!(
                part == whole[2 * range.start..2 * range.end],
                "{pack}: {range:?}"
            );
        }
        let quantization = source.quantization(names[0]).unwrap();
        let is_double = matches!(quantization, Quantization::FourBit { double: true, .. });
        assert_eq!(is_double, double, "{pack}");
        let shape = Shape::new(source.shape(names[0]).unwrap());
        let quantized = source.read_quantized(names[0]).unwrap();
        let values = dequantized(&quantized, quantization, shape, DType::BF16);
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|v| half::bf16::from_f32(*v).to_le_bytes())
            .collect();
        assert!(bytes == whole, "{pack}");
    }
}

/// A weight of `rows` rows of 256 elements, as bitsandbytes stores it with double quantization.
fn doubly_quantized(rows: usize) -> Tensors {
    let (shape, quantization) = (
        Shape::new(&[rows, 256]),
        Quantization::four_bit(Codebook::Nf4, true),
    );
    let value = |i: usize| ((i * 7919) % 1009) as f32 / 504.5 - 1.0;
    // Blocks of other scales in each row, so that every nested scale differs.
    let values: Vec<f32> = (0..shape.elems())
        .map(|i| value(i) * (1.0 + (i / 256) as f32 / 8.0))
        .collect();
    let mut bytes = vec![0; quantization.bytes(shape)];
    quantization.quantize(&values, shape, &mut bytes);
    let parts = quantization.parts(shape);
    let state = json!({
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, 256], "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": f32s(&bytes[parts.offset.clone()])[0],
    });
    let f32_bytes = |values: &[f32]| bytemuck::cast_slice(values).to_vec();
    let stored = [
        ("", Dtype::U8, bytes[parts.codes].to_vec()),
        (".absmax", Dtype::U8, bytes[parts.magnitudes].to_vec()),
        (".nested_absmax", Dtype::F32, bytes[parts.nested].to_vec()),
        (".quant_map", Dtype::F32, f32_bytes(Codebook::Nf4.values())),
        (
            ".nested_quant_map",
            Dtype::F32,
            f32_bytes(quantized::nested_values()),
        ),
        (
            ".quant_state.bitsandbytes__nf4",
            Dtype::U8,
            state.to_string().into_bytes(),
        ),
    ];
    let tensor = |(part, dtype, data): (&str, Dtype, Vec<u8>)| {
        let elems = data.len() / if dtype == Dtype::F32 { 4 } else { 1 };
        let shape = if part.is_empty() {
            vec![elems, 1]
        } else {
            vec![elems]
        };
        (format!("a.weight{part}"), (dtype, shape, data))
    };
    stored.map(tensor).into()
}

/// A range that begins after the first nested block reads the scales of its own blocks.
#[test]
fn ranges_of_doubly_quantized_weights_have_their_own_scales() {
    let source = open(&doubly_quantized(200)).unwrap();
    let whole = source.read("a.weight", DType::F32).unwrap();
    for range in [16_383..16_385, 20_000..40_000, 49_151..51_200] {
        let mut part = vec![0; 4 * range.len()];
        let read = source.read_range("a.weight", range.clone(), DType::F32, &mut part);
        read.unwrap();
        assert!(part == whole[4 * range.start..4 * range.end], "{range:?}");
    }
}

/// Only weights that a file has as they are, aligned, are mapped from it.
#[test]
fn weights_are_in_a_file_if_nothing_converts_them() {
    let bytes = bytemuck::cast_slice(&[1.5f32; 8]).to_vec();
    let tensors = Tensors::from([
        (
            "a.weight".to_owned(),
            (Dtype::F32, vec![2, 4], bytes.clone()),
        ),
        (
            "b.weight".to_owned(),
            (Dtype::BF16, vec![16], bytes.clone()),
        ),
    ]);
    let mut source = open(&tensors).unwrap();
    let (file, range) = source.in_file("a.weight", DType::F32).unwrap();
    let mut found = vec![0; 32];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut found, range.start).unwrap();
    assert_eq!((found, range.end - range.start), (bytes, 32));
    assert!(source.in_file("b.weight", DType::BF16).is_some());
    for (name, dtype) in [
        ("a.weight", DType::BF16),
        ("b.weight", DType::F16),
        ("c", DType::F32),
    ] {
        assert!(source.in_file(name, dtype).is_none(), "{name} {dtype}");
    }
    source.quantize_on_read([("a.weight".to_owned(), Quantization::Int8)].into());
    assert!(source.in_file("a.weight", DType::F32).is_none());
    let source = open(&doubly_quantized(1)).unwrap();
    assert!(source.in_file("a.weight", DType::U8).is_none());
    // A header whose end is not aligned, as some writers make.
    let header = r#"{"a.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} "#;
    assert_eq!(header.len() % 4, 2);
    let dir = tempfile::tempdir().unwrap();
    for (pad, is_aligned) in [(0, false), (2, true)] {
        let path = dir.path().join("model.safetensors");
        let padded = format!("{header}{}", " ".repeat(pad));
        let mut bytes = (padded.len() as u64).to_le_bytes().to_vec();
        bytes.extend(padded.as_bytes());
        bytes.extend([0; 8]);
        std::fs::write(&path, bytes).unwrap();
        let source = WeightSource::open_file(&path).unwrap();
        let place = source.in_file("a.weight", DType::F32);
        assert_eq!(place.is_some(), is_aligned, "{pad}");
    }
}

/// Descriptions, sizes and tables that bitsandbytes never writes.
#[test]
fn hostile_quantized_weights_are_refused() {
    const WEIGHT: &str = "model.language_model.layers.0.mlp.down_proj.weight";
    const STATE: &str =
        "model.language_model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4";
    let refused = |pack: &str, what: &str, change: &dyn Fn(&mut Tensors)| {
        let mut tensors = one_weight(pack, "model.language_model.layers.0.mlp.down_proj");
        change(&mut tensors);
        match open(&tensors).map(|_| ()) {
            Err(WeightError::Quantized { name, .. }) => assert_eq!(name, WEIGHT, "{what}"),
            other => panic!("{what}: {other:?}"),
        }
    };
    let mut states: Vec<(String, Value)> = Vec::new();
    for (field, values) in [
        ("quant_type", vec![json!("nf5"), json!("fp4"), Value::Null]),
        (
            "blocksize",
            vec![json!(0), json!(63), json!(1 << 20), json!(-64), json!(128)],
        ),
        ("dtype", vec![json!("int8")]),
        (
            "shape",
            vec![
                json!([]),
                json!([0, 72]),
                json!([64, 73]),
                json!([u64::MAX, u64::MAX]),
                json!([1u64 << 62, 4]),
                json!([1, 1, 1, 1, 1, 1, 1, 1, 1, 64, 72]),
                json!("64x72"),
            ],
        ),
        ("nested_blocksize", vec![json!(128), Value::Null]),
        ("nested_dtype", vec![json!("float16")]),
        (
            "nested_offset",
            vec![json!(1e300), json!("0.1"), Value::Null],
        ),
    ] {
        states.extend(values.into_iter().map(|value| (field.to_owned(), value)));
    }
    for (field, value) in states {
        refused("glm-4.1v-nf4", &format!("{field} = {value}"), &|tensors| {
            let (_, shape, bytes) = tensors.get_mut(STATE).unwrap();
            let mut state: Value = serde_json::from_slice(bytes).unwrap();
            state[&field] = value.clone();
            *bytes = state.to_string().into_bytes();
            *shape = vec![bytes.len()];
        });
    }
    for text in ["", "{", "[]", "null", "\u{0}"] {
        refused("glm-4.1v-nf4", text, &|tensors| {
            let (_, shape, bytes) = tensors.get_mut(STATE).unwrap();
            *bytes = text.as_bytes().to_vec();
            *shape = vec![bytes.len()];
        });
    }
    for part in [
        "",
        ".absmax",
        ".quant_map",
        ".nested_absmax",
        ".nested_quant_map",
    ] {
        let name = format!("{WEIGHT}{part}");
        refused("glm-4.1v-nf4", &format!("no {part}"), &|tensors| {
            tensors.remove(&name);
        });
        refused("glm-4.1v-nf4", &format!("short {part}"), &|tensors| {
            let (dtype, shape, bytes) = tensors.get_mut(&name).unwrap();
            bytes.truncate(bytes.len() / 2);
            (*dtype, *shape) = (Dtype::U8, vec![bytes.len()]);
        });
    }
    for table in [".quant_map", ".nested_quant_map"] {
        refused("glm-4.1v-nf4", table, &|tensors| {
            tensors.get_mut(&format!("{WEIGHT}{table}")).unwrap().2[5] ^= 1;
        });
    }
    let module = WEIGHT.strip_suffix(".weight").unwrap();
    refused("glm-4.1v-int8", "format", &|tensors| {
        tensors
            .get_mut(&format!("{module}.weight_format"))
            .unwrap()
            .2[0] = 2;
    });
    refused("glm-4.1v-int8", "scales", &|tensors| {
        let (_, shape, bytes) = tensors.get_mut(&format!("{module}.SCB")).unwrap();
        bytes.truncate(4);
        *shape = vec![1];
    });
    refused("glm-4.1v-int8", "codes", &|tensors| {
        tensors.get_mut(WEIGHT).unwrap().0 = Dtype::U8;
    });
    // A scale that is not finite is found when it is read.
    let mut tensors = one_weight("glm-4.1v-int8", module);
    let scales = &mut tensors.get_mut(&format!("{module}.SCB")).unwrap().2;
    scales[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let source = open(&tensors).unwrap();
    assert!(matches!(
        source.read_quantized(WEIGHT),
        Err(WeightError::Quantized { .. })
    ));
}

#[test]
fn a_plain_weight_quantized_on_reading_has_the_values_of_its_quantized_form() {
    let shape = Shape::new(&[9, 70]);
    let values: Vec<f32> = (0..630)
        .map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0)
        .collect();
    let bytes = bytemuck::cast_slice(&values).to_vec();
    let tensors = Tensors::from([("a.weight".to_owned(), (Dtype::F32, vec![9, 70], bytes))]);
    for quantization in [
        Quantization::four_bit(Codebook::Nf4, true),
        Quantization::Int8,
    ] {
        let mut source = open(&tensors).unwrap();
        source.quantize_on_read([("a.weight".to_owned(), quantization)].into());
        let mut quantized = vec![0; quantization.bytes(shape)];
        quantization.quantize(&values, shape, &mut quantized);
        assert_eq!(source.read_quantized("a.weight").unwrap(), quantized);
        let dense = dequantized(&quantized, quantization, shape, DType::F32);
        let mut part = vec![0; 4 * 100];
        source
            .read_range("a.weight", 65..165, DType::F32, &mut part)
            .unwrap();
        assert_eq!(f32s(&part), dense[65..165]);
    }
    // Int8 rounds to f16 first, whose range is smaller.
    let large = bytemuck::cast_slice(&[1e6f32; 64]).to_vec();
    let tensors = Tensors::from([("a.weight".to_owned(), (Dtype::F32, vec![1, 64], large))]);
    let mut source = open(&tensors).unwrap();
    source.quantize_on_read([("a.weight".to_owned(), Quantization::Int8)].into());
    assert!(matches!(
        source.read_quantized("a.weight"),
        Err(WeightError::NotFinite { .. })
    ));
}
