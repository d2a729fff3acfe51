//! Enums and closed sets of values in a configuration.

use crate::lang::{Text, both, text};
use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use models::cogvlm::config::TemplateVersion;
use models::data::{DataFormat, PromptSource, PromptStyle};
use serde::{Deserialize, Serialize};

/// `--device` as given on the command line: the CPU, NVIDIA GPUs, or `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// GPUs where there is one that can be used, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs, or an error.
    Cuda,
}

/// `--verify-gpu`: how a run verifies the GPUs that it uses, before it is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VerifyGpu {
    /// Not at all.
    Off,
    /// What the run uses, once for each combination of GPU, driver, libraries and kernels.
    #[default]
    Auto,
    /// Every operation, in every run.
    Full,
}

/// `--cpu-math`: order in which CPUs sum products with a bf16 matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpuMathChoice {
    /// That of AMX where the processors of all ranks have it, else `portable`.
    Native,
    /// One chain of f32 multiply-adds, as for all other products.
    Portable,
    /// That of AMX. Processors without it compute the same bits in f32 arithmetic.
    Amx,
}

/// `--cuda-graph`: whether repeated sequences of GPU commands are replayed as CUDA graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CudaGraph {
    /// Where there are enough of them and the GPU takes them.
    #[default]
    Auto,
    /// All, or an error.
    On,
    /// None.
    Off,
}

/// Kind of device on which the ranks of a run compute, after `auto` is resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

impl Device {
    /// Name of the device as a value of `--device`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// `--precision`: dtypes of weights, activations and optimizer states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrecisionChoice {
    /// 16-bit weights and activations, f32 master weights and moments.
    Bf16,
    /// f16 weights and activations, f32 master weights and moments, a loss scale.
    Fp16,
    /// Everything in f32.
    #[value(alias = "fp32")]
    F32,
    /// Weights, moments and gradients in bf16, with stochastic rounding.
    #[value(alias = "pure_bf16")]
    PureBf16,
}

/// `--data-format`: format of the files or directories with samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormatChoice {
    /// Whichever the file or directory has.
    #[default]
    Auto,
    /// `{id, image, conversations: [{role, content}]}`.
    Minicpm,
    /// `{messages: [{role, content, image}]}`.
    Glm4v,
    /// `{messages: [{role, content}], images}`.
    Messages,
    /// `{conversations: [{from, value}], images}`.
    Sharegpt,
    /// `{instruction, input, output, images}`.
    Alpaca,
    /// `{query, response, images}`.
    QueryResponse,
    /// `{texts: [{user, assistant}], images}` or `{conversation: [{input, output}]}`.
    Rounds,
    /// `{image, text}`.
    Caption,
    /// A directory with `images/` and `labels_*/`.
    CogvlmSft,
    /// A directory of images named by their labels.
    Captcha,
}

impl DataFormatChoice {
    /// Format in which the data is read. `None` for `Auto`, where the content decides.
    #[must_use]
    pub fn format(self) -> Option<DataFormat> {
        match self {
            Self::Auto => None,
            Self::Minicpm => Some(DataFormat::Minicpm),
            Self::Glm4v => Some(DataFormat::Glm4v),
            Self::Messages => Some(DataFormat::Messages),
            Self::Sharegpt => Some(DataFormat::ShareGpt),
            Self::Alpaca => Some(DataFormat::Alpaca),
            Self::QueryResponse => Some(DataFormat::QueryResponse),
            Self::Rounds => Some(DataFormat::Rounds),
            Self::Caption => Some(DataFormat::Caption),
            Self::CogvlmSft => Some(DataFormat::CogvlmSft),
            Self::Captcha => Some(DataFormat::Captcha),
        }
    }
}

/// `--exif-rotation`: what becomes of the orientation that an image's EXIF data states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExifRotation {
    /// The image is turned as it says.
    Apply,
    /// The image stays as it is stored, as in the published training code.
    #[default]
    Ignore,
}

/// `--template`: prompt template of CogVLM, CogVLM2 and CogAgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TemplateChoice {
    /// That of the model directory.
    #[default]
    Auto,
    /// The question alone.
    Base,
    /// Questions and answers in turn.
    Chat,
    /// A question and a short answer.
    Vqa,
    /// The former form of `chat`.
    ChatOld,
    /// As the training scripts on SwissArmyTransformer write `base`.
    SatBase,
    /// As they write `chat`.
    SatChat,
    /// As they write `vqa`.
    SatVqa,
    /// As they write the former form of `chat`.
    SatChatOld,
}

impl TemplateChoice {
    /// Prompt style of this template. `None` for `Auto`: the model directory sets the style.
    #[must_use]
    pub fn style(self) -> Option<PromptStyle> {
        use {PromptSource as S, TemplateVersion as V};
        let (template, source) = match self {
            Self::Auto => return None,
            Self::Base => (V::Base, S::Hub),
            Self::Chat => (V::Chat, S::Hub),
            Self::Vqa => (V::Vqa, S::Hub),
            Self::ChatOld => (V::ChatOld, S::Hub),
            Self::SatBase => (V::Base, S::Sat),
            Self::SatChat => (V::Chat, S::Sat),
            Self::SatVqa => (V::Vqa, S::Sat),
            Self::SatChatOld => (V::ChatOld, S::Sat),
        };
        Some(PromptStyle { template, source })
    }
}

/// `--rope-precision`: whether the angles of rotary position embeddings are rounded as in the model's own
/// code, or stay in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RopeChoice {
    /// As the model's own code, which published weights were trained with.
    #[default]
    Model,
    /// Nowhere.
    F32,
}

/// `--init`: source of the initial weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InitChoice {
    /// The safetensors files of the model directory.
    Checkpoint,
    /// Random weights from the seed.
    Random,
}

/// `--lr-scheduler-type`: learning-rate schedule, under its name in Hugging Face or DeepSpeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheduler {
    /// Down to zero in a straight line.
    Linear,
    /// Down to zero along half a cosine.
    Cosine,
    /// Along several half cosine waves, each from the full rate to zero.
    #[value(name = "cosine_with_restarts", alias = "cosine-with-restarts")]
    CosineWithRestarts,
    /// Along half a cosine to a lowest rate.
    #[value(name = "cosine_with_min_lr", alias = "cosine-with-min-lr")]
    CosineWithMinLr,
    /// Along a power of the steps that are left.
    Polynomial,
    /// By the root of the steps.
    #[value(name = "inverse_sqrt", alias = "inverse-sqrt")]
    InverseSqrt,
    /// That of SwissArmyTransformer: a slow start of 100 updates, then along half a cosine to a tenth.
    #[value(name = "sat_cosine", alias = "sat-cosine")]
    SatCosine,
    /// That of SwissArmyTransformer: the same start, then down in a straight line.
    #[value(name = "sat_linear", alias = "sat-linear")]
    SatLinear,
    /// That of SwissArmyTransformer: the same start, then constant.
    #[value(name = "sat_constant", alias = "sat-constant")]
    SatConstant,
    /// Constant, warmup ignored.
    Constant,
    /// Constant after the warmup.
    #[value(name = "constant_with_warmup", alias = "constant-with-warmup")]
    ConstantWithWarmup,
    /// DeepSpeed's `WarmupLR`: constant after a warmup along a logarithm.
    #[value(name = "warmup_lr", alias = "warmup-lr")]
    WarmupLr,
    /// DeepSpeed's `WarmupDecayLR`: the same, then down in a straight line.
    #[value(name = "warmup_decay_lr", alias = "warmup-decay-lr")]
    WarmupDecayLr,
    /// DeepSpeed's `WarmupCosineLR`: the same, then down along half a cosine.
    #[value(name = "warmup_cosine_lr", alias = "warmup-cosine-lr")]
    WarmupCosineLr,
}

impl Scheduler {
    /// Names of the arguments in `--lr-scheduler-kwargs` that this schedule takes.
    #[must_use]
    pub const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Linear
            | Self::Cosine
            | Self::SatCosine
            | Self::SatLinear
            | Self::SatConstant
            | Self::Constant
            | Self::ConstantWithWarmup => &[],
            Self::CosineWithRestarts => &["num_cycles"],
            Self::CosineWithMinLr => &["num_cycles", "min_lr", "min_lr_rate"],
            Self::Polynomial => &["power", "lr_end"],
            Self::InverseSqrt => &["timescale"],
            Self::WarmupLr => &["warmup_type", "warmup_min_lr"],
            Self::WarmupDecayLr => &["warmup_type", "warmup_min_lr", "total_num_steps"],
            Self::WarmupCosineLr => &[
                "warmup_type",
                "warmup_min_ratio",
                "cos_min_ratio",
                "total_num_steps",
            ],
        }
    }
}

/// `--save-strategy`, `--eval-strategy` and `--logging-strategy`: when a checkpoint is saved, or the held-out
/// samples are evaluated, or a row is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Strategy {
    /// Never.
    No,
    /// Every given number of steps.
    Steps,
    /// At the end of every epoch.
    Epoch,
}

/// `--save-steps`, `--eval-steps` and `--logging-steps`: steps between two actions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Every {
    /// A number of steps.
    Steps(u64),
    /// A share of all steps, above 0 and below 1.
    Share(f64),
}

impl FromStr for Every {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Text> {
        if let Ok(steps) = text.parse() {
            return Ok(Self::Steps(steps));
        }
        match text.parse::<f64>() {
            Ok(share) if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            Ok(steps) if steps >= 1.0 && steps.fract() == 0.0 && steps < 1e15 => {
                Ok(Self::Steps(steps as u64))
            }
            _ => Err(both(
                "must be a whole number, or a share between 0 and 1",
                "必须是整数，或 0 到 1 之间的比例",
            )
            .into()),
        }
    }
}

/// How often the training loop saves a checkpoint, evaluates or logs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cadence {
    /// Never.
    Never,
    /// Once, after the last step.
    End,
    /// Every given number of steps, and after the last step.
    Steps(u64),
    /// Every given share of all steps, rounded up to whole steps, and after the last step.
    Share(f64),
    /// After every epoch, and after the last step.
    Epoch,
}

impl Cadence {
    /// Whether a save, evaluation or log row is due when `step` of `total` training steps (optimizer updates)
    /// are completed. `epoch_ended`: whether the last of them completed an epoch.
    pub fn is_due(self, step: u64, total: u64, epoch_ended: bool) -> bool {
        let last = step == total;
        match (self, self.steps(total)) {
            (Self::Never, _) => false,
            (_, Some(every)) => last || step.is_multiple_of(every),
            (Self::Epoch, _) => last || epoch_ended,
            _ => last,
        }
    }

    /// Steps between two actions in a run of `total` steps; `None` if it is not counted in steps.
    pub fn steps(self, total: u64) -> Option<u64> {
        match self {
            Self::Steps(every) => Some(every.max(1)),
            Self::Share(share) => Some(((share * total as f64).ceil() as u64).max(1)),
            Self::Never | Self::End | Self::Epoch => None,
        }
    }
}

impl From<Every> for Cadence {
    fn from(every: Every) -> Self {
        match every {
            Every::Steps(steps) => Self::Steps(steps),
            Every::Share(share) => Self::Share(share),
        }
    }
}

/// `--report-to`: report format in addition to the files that every run writes into its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportTo {
    /// Files of the run directory only.
    None,
    /// TensorBoard event files besides.
    Tensorboard,
}

/// `--lr-scale`: rule for the factor on the learning rate. `n` is the number of micro-batches per update over
/// all ranks (ranks × accumulation steps).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LrScale {
    /// 1
    None,
    /// `n`
    Linear,
    /// The root of `n`.
    Sqrt,
}

impl LrScale {
    /// Factor on the learning rate for `n` micro-batches per update over all ranks: 1, `n` or the root of
    /// `n`.
    pub fn factor(self, n: usize) -> f64 {
        match self {
            Self::None => 1.0,
            Self::Linear => n as f64,
            Self::Sqrt => (n as f64).sqrt(),
        }
    }
}

/// `--data-workers`: number of threads per rank that load samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workers {
    /// As many threads as the rank's share of the cores allows.
    #[default]
    Auto,
    /// Number of threads. With 0 the training thread reads the samples itself.
    Count(usize),
}

impl FromStr for Workers {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => match text.parse() {
                Ok(count) if count <= 256 => Ok(Self::Count(count)),
                _ => Err(text!(
                    "'{text}' is neither auto nor a number up to 256",
                    "'{text}' 既不是 auto，也不是不超过 256 的数"
                )),
            },
        }
    }
}

impl fmt::Display for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Count(count) => count.fmt(f),
        }
    }
}

/// `--bind-cores`: processor cores that the ranks of a machine keep to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BindCores {
    /// Each rank takes an equal part of the cores that the process may use.
    Auto,
    /// The kernel places threads freely.
    None,
    /// Each rank takes an equal part of these cores, numbered as Linux does.
    List(Vec<usize>),
}

impl FromStr for BindCores {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            // A switch, as `deepspeed` has.
            "auto" | "true" => Ok(Self::Auto),
            "none" | "false" => Ok(Self::None),
            _ => core_list(text).map(Self::List).ok_or_else(|| {
                text!(
                    "'{text}' is neither auto nor none nor a list such as 0-7,16-23",
                    "'{text}' 既不是 auto 或 none，也不是 0-7,16-23 这样的列表"
                )
            }),
        }
    }
}

impl fmt::Display for BindCores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::List(cores) => f.write_str(&core_ranges(cores)),
        }
    }
}

/// Largest number of a core in a list: the kernel's own limit is 8192.
const MAX_CORE: usize = 1 << 16;

/// Numbers in a list of Linux, such as `0-3,8`; sorted, each once. `None` if it is none.
pub(crate) fn core_list(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last > MAX_CORE {
            return None;
        }
        cores.extend(first..=last);
    }
    cores.sort_unstable();
    cores.dedup();
    Some(cores)
}

/// Numbers as Linux lists them: `0-3,8`.
pub(crate) fn core_ranges(cores: &[usize]) -> String {
    let mut cores = cores.to_vec();
    cores.sort_unstable();
    let runs = cores.chunk_by(|a, b| a + 1 == *b);
    let text = runs.map(|run| match run {
        [one] => one.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    text.collect::<Vec<_>>().join(",")
}

/// `--checkpoint-activations`: parts of the model whose activations are recomputed in backward (activation
/// checkpointing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recompute {
    /// Whether the language model recomputes its activations.
    pub llm: bool,
    /// Whether the vision tower recomputes its activations.
    pub vit: bool,
    /// Whether the resampler recomputes its activations.
    pub resampler: bool,
}

impl Recompute {
    /// All three parts (language model, vision tower, resampler) recompute their activations.
    pub const ALL: Self = Self {
        llm: true,
        vit: true,
        resampler: true,
    };
    /// No part recomputes its activations; all of them are stored until backward.
    pub const NONE: Self = Self {
        llm: false,
        vit: false,
        resampler: false,
    };
}

impl FromStr for Recompute {
    type Err = Text;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            // A switch, as SwissArmyTransformer has.
            "all" | "true" => return Ok(Self::ALL),
            "none" | "false" => return Ok(Self::NONE),
            _ => {}
        }
        let mut chosen = Self::NONE;
        for word in text.split(',') {
            match word.trim() {
                "llm" => chosen.llm = true,
                "vit" | "vpm" | "vision" => chosen.vit = true,
                "resampler" => chosen.resampler = true,
                other => {
                    return Err(text!(
                        "'{other}' is not llm, vit, resampler, all or none",
                        "'{other}' 不是 llm、vit、resampler、all 或 none"
                    ));
                }
            }
        }
        Ok(chosen)
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::ALL {
            return f.write_str("all");
        }
        let towers = [
            ("llm", self.llm),
            ("vit", self.vit),
            ("resampler", self.resampler),
        ];
        let chosen: Vec<&str> = towers
            .iter()
            .filter(|(_, on)| *on)
            .map(|(n, _)| *n)
            .collect();
        match &chosen[..] {
            [] => f.write_str("none"),
            chosen => f.write_str(&chosen.join(",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn towers_and_worker_counts_parse_what_they_print() {
        for text in ["all", "none", "llm", "llm,resampler", "vit"] {
            let read: Recompute = text.parse().expect(text);
            assert_eq!(read.to_string(), text);
        }
        assert_eq!("llm,vit,resampler".parse(), Ok(Recompute::ALL));
        assert!("llm,nose".parse::<Recompute>().is_err());
        assert_eq!("auto".parse(), Ok(Workers::Auto));
        assert_eq!("0".parse(), Ok(Workers::Count(0)));
        assert!("-1".parse::<Workers>().is_err());
        assert_eq!(LrScale::Sqrt.factor(16), 4.0);
    }

    #[test]
    fn lists_of_cores_are_read_and_written_as_linux_does() {
        assert_eq!(core_list("0-1\n"), Some(vec![0, 1]));
        assert_eq!(core_list("8-10,0,2-3,9"), Some(vec![0, 2, 3, 8, 9, 10]));
        for bad in ["", "a", "3-1", "0-", "0-4000000000"] {
            assert_eq!(core_list(bad), None, "{bad}");
        }
        for text in ["auto", "none", "5", "0,2-3,8-15"] {
            let read: BindCores = text.parse().expect(text);
            assert_eq!(read.to_string(), text);
        }
        assert_eq!("true".parse(), Ok(BindCores::Auto));
        assert!("all".parse::<BindCores>().is_err());
    }

    #[test]
    fn every_cadence_except_never_covers_the_last_step() {
        let due = |cadence: Cadence| -> Vec<u64> {
            (1..=7)
                .filter(|&step| cadence.is_due(step, 7, step == 4))
                .collect()
        };
        assert_eq!(due(Cadence::Never), Vec::<u64>::new());
        assert_eq!(due(Cadence::End), [7]);
        assert_eq!(due(Cadence::Steps(3)), [3, 6, 7]);
        assert_eq!(due(Cadence::Epoch), [4, 7]);
        assert_eq!(due(Cadence::Share(0.5)), [4, 7]);
    }
}
