//! The arguments of `launcher plan`: every flag of training, and what to plan for.

use crate::lang::{Text, both, text};
use std::num::NonZeroUsize;
use std::str::FromStr;

use clap::{CommandFactory, FromArgMatches, Parser};

use super::Args;
use crate::units::parse_bytes;

/// Devices (GPUs) of the machine that a run is planned for, written as `2x24GiB`: how many, and the memory of
/// each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hardware {
    /// Number of devices of the machine.
    pub devices: usize,
    /// Memory of each device in bytes.
    pub device_bytes: u64,
}

impl FromStr for Hardware {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Text> {
        let form = || {
            text!(
                "'{text}' is not of the form 2x24GiB",
                "'{text}' 不是 2x24GiB 的形式"
            )
        };
        let (count, bytes) = text.split_once(['x', 'X']).unwrap_or(("1", text));
        let devices = count.trim().parse().map_err(|_| form())?;
        if devices == 0 {
            return Err(both("at least 1 device is needed", "至少需要 1 个设备").into());
        }
        Ok(Self {
            devices,
            device_bytes: parse_bytes(bytes)?,
        })
    }
}

/// Bytes per second, such as `12GB/s`: G and GB are powers of 10 here, as on data sheets; GiB are not.
fn parse_rate(text: &str) -> Result<u64, Text> {
    let number = text.trim();
    let number = number.strip_suffix("/s").unwrap_or(number).trim();
    let decimal = number.strip_suffix("GB").or(number.strip_suffix('G'));
    let rate = match decimal {
        Some(giga) => giga
            .trim()
            .parse::<f64>()
            .ok()
            .map(|giga| (giga * 1e9) as u64),
        None => Some(parse_bytes(number)?),
    };
    rate.filter(|rate| *rate > 0).ok_or_else(|| {
        text!(
            "'{text}' is not a rate such as 12GB/s",
            "'{text}' 不是 12GB/s 这样的速率"
        )
    })
}

fn parse_tflops(text: &str) -> Result<f64, Text> {
    let number = text.trim().parse::<f64>().ok();
    number
        .filter(|number| number.is_finite() && *number > 0.0)
        .ok_or_else(|| text!("'{text}' is not a positive number", "'{text}' 不是正数"))
}

/// What the user typed after `launcher plan`.
#[derive(Debug, Clone, Default, PartialEq, Parser)]
#[command(name = "launcher plan", version, max_term_width = 100)]
pub struct PlanArgs {
    /// The run that is planned.
    #[command(flatten)]
    pub run: Args,
    /// Plan for these devices instead of this machine's, such as 24GiB or 2x24GiB; one rank each
    #[arg(long, value_name = "NxBYTES", help_heading = "What to plan for")]
    pub hw: Option<Hardware>,
    /// Plan for this much host memory instead of what is free here
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "What to plan for")]
    pub ram: Option<u64>,
    /// Plan for this much disk space for spill files
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "What to plan for")]
    pub nvme: Option<u64>,
    /// Without --data, count a sample with a video of this many frames (MiniCPM-V 4.5, GLM-4.1V, GLM-4.6V-Flash)
    #[arg(long, value_name = "FRAMES", help_heading = "What to plan for")]
    pub max_frames: Option<NonZeroUsize>,
    /// Largest area of a frame of that video in pixels; the model's own bound holds besides
    #[arg(long, value_name = "PIXELS", help_heading = "What to plan for")]
    pub max_frame_pixels: Option<NonZeroUsize>,
    /// Read config.json only; --model may be that file
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What to plan for")]
    pub no_weights: Option<bool>,
    /// List every ZeRO stage and offload tier, what it needs, and whether it fits
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What to plan for")]
    pub matrix: Option<bool>,
    /// Compare ZeRO stages, pipeline stages and quantization, with the estimated time of a step of each
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What to plan for")]
    pub propose: Option<bool>,
    /// Bytes per second between two cards, such as 12GB/s, for --propose
    #[arg(long, value_name = "BYTES/s", value_parser = parse_rate, requires = "propose", help_heading = "What to plan for")]
    pub bus: Option<u64>,
    /// Operations per second of a card in units of 10^12, for --propose
    #[arg(long, value_name = "N", value_parser = parse_tflops, requires = "propose", help_heading = "What to plan for")]
    pub tflops: Option<f64>,
    /// Print the plan as JSON with stable keys
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help_heading = "What to plan for")]
    pub json: Option<bool>,
}

/// What the subcommand is for.
const ABOUT: &str = "Shows what a run needs and whether it fits: bytes per rank by phase, tier and kind, before weights are loaded. \
Takes every flag of training";

impl PlanArgs {
    /// The command of this subcommand, with its own description instead of the flattened struct's.
    pub(super) fn described() -> clap::Command {
        Self::command().about(ABOUT).long_about(ABOUT)
    }

    pub(super) fn parse_words(words: &[String]) -> Result<Self, clap::Error> {
        let matches = Self::described().try_get_matches_from(words)?;
        Self::from_arg_matches(&matches)
    }

    /// The flags of this subcommand without the training flags, for the table of flags.
    pub(super) fn own_flags() -> clap::Command {
        let of_training: Vec<String> = Args::command()
            .get_arguments()
            .filter_map(|arg| arg.get_long().map(str::to_owned))
            .collect();
        let mut own = clap::Command::new("launcher plan").about(ABOUT);
        for arg in Self::command().get_arguments() {
            let long = arg.get_long();
            if long.is_some_and(|long| !of_training.iter().any(|known| known == long)) {
                own = own.arg(arg.clone());
            }
        }
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_and_positive() {
        assert_eq!(parse_rate("12GB/s"), Ok(12_000_000_000));
        assert_eq!(parse_rate(" 1GiB/s "), Ok(1 << 30));
        assert_eq!(parse_tflops("45"), Ok(45.0));
        assert!(parse_rate("0GB/s").is_err() && parse_rate("fast").is_err());
        assert!(parse_tflops("-1").is_err() && parse_tflops("inf").is_err());
    }

    #[test]
    fn hardware_is_a_count_of_devices_of_a_size() {
        let hardware = Hardware {
            devices: 2,
            device_bytes: 24 << 30,
        };
        assert_eq!("2x24GiB".parse(), Ok(hardware));
        assert_eq!("2X24g".parse(), Ok(hardware));
        let one = Hardware {
            devices: 1,
            ..hardware
        };
        assert_eq!("24GiB".parse(), Ok(one));
        for wrong in ["", "0x24GiB", "2x", "x24GiB", "2x24Q"] {
            assert!(wrong.parse::<Hardware>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_subcommand_has_its_own_flags_and_those_of_training() {
        let command = PlanArgs::own_flags();
        let own: Vec<&str> = command
            .get_arguments()
            .filter_map(clap::Arg::get_long)
            .collect();
        let expected =
            "hw ram nvme max-frames max-frame-pixels no-weights matrix propose bus tflops json";
        assert_eq!(own.join(" "), expected);
    }
}
