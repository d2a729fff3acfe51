//! How base weights are quantized: flags to the resolved choice.

use super::{note, out_of_range};
use crate::cli::{Args, Note};
use crate::config::words::value_name;
use crate::config::{Quantize, QuantizeFormat};
use crate::error::Failure;
use crate::lang::both;

/// Resolves `--quantize` and the names that Hugging Face has for it.
pub(super) fn resolve(args: &Args, notes: &mut Vec<Note>) -> Result<Option<Quantize>, Failure> {
    let named = args.bnb_4bit_quant_type;
    if let Some(QuantizeFormat::Int8 | QuantizeFormat::None) = named {
        return Err(out_of_range(
            "--bnb-4bit-quant-type",
            both("is nf4 or fp4", "应为 nf4 或 fp4"),
        ));
    }
    let four = args.load_in_4bit == Some(true);
    let eight = args.load_in_8bit == Some(true);
    let loaded = match (four, eight) {
        (true, true) => {
            return Err(out_of_range(
                "--load-in-4bit --load-in-8bit",
                both(
                    "weights have 4 or 8 bits, not both",
                    "权重要么是 4 位，要么是 8 位，不能两者都是",
                ),
            ));
        }
        (true, false) => Some(named.unwrap_or(QuantizeFormat::Nf4)),
        (false, true) => Some(QuantizeFormat::Int8),
        (false, false) => None,
    };
    let format = match (args.quantize, loaded) {
        (Some(own), Some(loaded)) if own != loaded => {
            return Err(out_of_range(
                &format!("--quantize {}", value_name(own)),
                both(
                    "differs from --load-in-4bit, --load-in-8bit or --bnb-4bit-quant-type",
                    "与 --load-in-4bit、--load-in-8bit 或 --bnb-4bit-quant-type 不一致",
                ),
            ));
        }
        (own, loaded) => own.or(loaded),
    };
    let four_bits = matches!(format, Some(QuantizeFormat::Nf4 | QuantizeFormat::Fp4));
    let idle = [
        ("--bnb-4bit-quant-type", named.is_some() && !four_bits),
        (
            "--quantize-double",
            args.quantize_double.is_some() && !four_bits,
        ),
        (
            "--quantize-modules",
            args.quantize_modules.is_some() && !four_bits && format != Some(QuantizeFormat::Int8),
        ),
    ];
    for (flag, _) in idle.iter().filter(|(_, idle)| *idle) {
        let reason = both(
            "no weight is quantized in a format that has it",
            "没有权重以具有该设置的格式压缩存储",
        );
        notes.push(note(flag, reason));
    }
    Ok(format.map(|format| Quantize {
        format,
        double: four_bits && args.quantize_double.unwrap_or(false),
        modules: args.quantize_modules.clone(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tests::parse_line;

    fn resolved(line: &str) -> Result<Option<Quantize>, Failure> {
        let (args, _) = parse_line(line).expect("parses");
        resolve(&args, &mut Vec::new())
    }

    #[test]
    fn names_of_other_trainers_mean_the_same() {
        let nf4 = Quantize {
            format: QuantizeFormat::Nf4,
            double: true,
            modules: None,
        };
        for line in [
            "--quantize nf4 --quantize-double",
            "--load_in_4bit true --bnb_4bit_use_double_quant true",
            "--load_in_4bit --bnb_4bit_quant_type nf4 --use_double_quant true",
            "--quantization_bit 4 --quantization_method bnb --quantization_type nf4 --double_quantization true",
            "--quant_bits 4 --quant_method bnb --bnb_4bit_use_double_quant true",
            "--q_lora true --quantize-double true --bnb_4bit_compute_dtype bfloat16",
        ] {
            assert_eq!(resolved(line).expect(line), Some(nf4.clone()), "{line}");
        }
        let format = |line: &str| resolved(line).expect(line).map(|found| found.format);
        assert_eq!(format("--load_in_8bit true"), Some(QuantizeFormat::Int8));
        assert_eq!(format("--quantization_bit 8"), Some(QuantizeFormat::Int8));
        assert_eq!(
            format("--load_in_4bit --bnb_4bit_quant_type fp4"),
            Some(QuantizeFormat::Fp4)
        );
        assert_eq!(format("--q_lora false --load_in_4bit false"), None);
        assert_eq!(format("--quantize none"), Some(QuantizeFormat::None));
    }

    #[test]
    fn choices_that_disagree_are_refused() {
        for line in [
            "--load_in_4bit true --load_in_8bit true",
            "--quantize int8 --load_in_4bit true",
            "--quantize nf4 --q_lora true --bnb_4bit_quant_type fp4",
            "--load_in_4bit --bnb_4bit_quant_type int8",
        ] {
            assert_eq!(resolved(line).expect_err(line).code.status(), 2, "{line}");
        }
    }

    #[test]
    fn settings_of_a_format_that_is_not_chosen_are_named() {
        let (args, _) = parse_line("--quantize-double --quantize int8").expect("parses");
        let mut notes = Vec::new();
        resolve(&args, &mut notes).expect("resolves");
        assert_eq!(notes.len(), 1);
    }
}
