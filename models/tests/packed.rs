//! Packed weights beside what bitsandbytes made of the same values.

use kernels::{Backend, Codebook, CpuBackend, DType, Packing, Shape, Tag, packed};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::PathBuf;

/// Units in the last place by which a mean of magnitudes may differ: the package adds them in another order.
const MEAN_ULPS: u32 = 2;

fn near(found: f32, wanted: f32) -> bool {
    found.to_bits().abs_diff(wanted.to_bits()) <= MEAN_ULPS
}

fn golden(file: &str) -> Vec<u8> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/quantized");
    std::fs::read(dir.join(file)).unwrap()
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

fn unpacked(packed: &[u8], packing: Packing, shape: Shape, dtype: DType) -> Vec<f32> {
    let cpu = CpuBackend::unlimited();
    let bytes = Shape::new(&[packed.len()]);
    let packed = cpu.upload(packed, bytes, DType::U8, Tag::Parameters);
    let dense = cpu.unpack(&packed.unwrap(), packing, shape, dtype).unwrap();
    dense.to_f32_vec().unwrap()
}

#[test]
fn tables_are_those_of_bitsandbytes() {
    let bytes = golden("maps.safetensors");
    let maps = SafeTensors::deserialize(&bytes).unwrap();
    for (name, values) in [
        ("nf4", &Codebook::Nf4.values()[..]),
        ("fp4", &Codebook::Fp4.values()[..]),
        ("dynamic_signed", &packed::nested_values()[..]),
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
        let packing = Packing::FourBit {
            codebook,
            block_elems: case["blocksize"].as_u64().unwrap() as u32,
            double,
        };
        let input = floats(&file, &format!("{}.input", text(case, "case")));
        let mut packed = vec![0; packing.bytes(shape)];
        packing.pack(&input, shape, &mut packed);
        let parts = packing.parts(shape);
        let plain = key.trim_end_matches(".nested");
        let codes = |name: &str| file.tensor(&format!("{plain}.{name}")).ok();
        let package = codes("codes").unwrap();
        let kernel = codes("codes_kernel").unwrap_or_else(|| package.clone());
        let both = package.data().iter().zip(kernel.data());
        for (i, (found, (package, kernel))) in
            packed[parts.codes.clone()].iter().zip(both).enumerate()
        {
            for nibble in [0xf0, 0x0f] {
                let of = |byte: &u8| byte & nibble;
                let is_known = [of(package), of(kernel)].contains(&of(found));
                assert!(is_known, "{key}: byte {i} is {found:02x}");
            }
        }
        // Magnitudes and values follow from the package's codes, which other rules than ours may have chosen.
        packed[parts.codes.clone()].copy_from_slice(package.data());
        let wanted = |name: &str| file.tensor(&format!("{key}.{name}")).ok();
        if double {
            assert_eq!(
                &packed[parts.magnitudes.clone()],
                wanted("absmax").unwrap().data(),
                "{key}"
            );
            let nested = f32s(&packed[parts.nested.clone()]);
            let offset = case["offset"].as_f64().unwrap() as f32;
            let found = f32s(&packed[parts.offset.clone()])[0];
            assert!(
                near(found, offset),
                "{key}: offset {found} instead of {offset}"
            );
            packed[parts.offset.clone()].copy_from_slice(&offset.to_le_bytes());
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
            packed[parts.nested.clone()].copy_from_slice(scales.data());
        } else {
            let name = format!("{key}.absmax");
            assert_eq!(
                bits(&f32s(&packed[parts.magnitudes.clone()])),
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
                let found = unpacked(&packed, packing, shape, dtype);
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
        let (name, shape, packing) = (text(&case, "case"), shape_of(&case), Packing::Int8);
        let input = floats(&file, &format!("{name}.weight"));
        let mut packed = vec![0; packing.bytes(shape)];
        packing.pack(&input, shape, &mut packed);
        let parts = packing.parts(shape);
        let codes = file.tensor(&format!("{name}.CB")).unwrap();
        assert_eq!(&packed[parts.codes], codes.data(), "{name}");
        let scales = floats(&file, &format!("{name}.SCB"));
        assert_eq!(f32s(&packed[parts.magnitudes]), scales, "{name}");
        let found = unpacked(&packed, packing, shape, DType::F32);
        let values = floats(&file, &format!("{name}.dequant_f32"));
        assert_eq!(bits(&found), bits(&values), "{name}");
    }
}

/// The bits of a large weight on one thread and on several.
#[test]
fn threads_do_not_change_packed_weights() {
    let shape = Shape::new(&[611, 320]);
    let values: Vec<f32> = (0..shape.elems())
        .map(|i| ((i * 2_654_435_761) % 65_521) as f32 / 32_768.0 - 1.0)
        .collect();
    for packing in [
        Packing::four_bit(Codebook::Nf4, true),
        Packing::four_bit(Codebook::Fp4, false),
        Packing::Int8,
    ] {
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().unwrap().install(|| {
                let mut packed = vec![0; packing.bytes(shape)];
                packing.pack(&values, shape, &mut packed);
                let dense = unpacked(&packed, packing, shape, DType::BF16);
                (packed, bits(&dense))
            })
        };
        assert_eq!(on(1), on(3), "{packing}");
    }
}
