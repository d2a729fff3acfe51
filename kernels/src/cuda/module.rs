//! Unit of compilation: one source file with the defines that choose its types and sizes.

use crate::DType;
use std::hash::{Hash, Hasher};

/// CUDA source text with wrappers of the PTX instructions that kernels use. Every module begins with it.
pub const PRIMITIVES: &str = include_str!("source/primitives.cuh");
/// CUDA source text with declarations that every kernel family uses. It precedes the family's own source
/// text.
pub const PRELUDE: &str = include_str!("source/prelude.cuh");

/// Source text of a family behind headers that only some families need.
macro_rules! with_headers {
    ($($path:literal),+) => {
        concat!($(include_str!($path), "\n"),+)
    };
}

/// Family of kernels that share one CUDA source file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum Family {
    /// Casts between float dtypes.
    Cast,
    /// Every primitive on its own, for tests.
    PrimitivesCheck,
    /// `AdamW` steps.
    AdamW,
    /// Gradient accumulation in bf16.
    Accumulate,
    /// Gradient norm.
    GradNorm,
    /// RMS norm and layer norm.
    Norm,
    /// Attention on tensor cores.
    Attention,
    /// Attention without tensor cores, for any dtype and head dim.
    AttentionPlain,
    /// Matrix products on tensor cores, and LoRA layers.
    LoraLinear,
    /// Two products of an adapter's backward in one pass.
    LoraGradients,
    /// Copies and sums around the products of LoRA layers.
    LinearParts,
    /// Matrix products in f32.
    MatmulPlain,
    /// Elementwise operations, dropout, rotary position embedding.
    Pointwise,
    /// Gathers, scatters and transpositions: rows moved without arithmetic.
    Rows,
    /// Sums over rows: scatter-add and column sums.
    RowSums,
    /// Cross entropy of logits: statistics, losses and gradients.
    Loss,
    /// Unpacking of weights of 4 or 8 bits.
    Unpack,
}

impl Family {
    /// Every kernel family: one for each CUDA source file with kernels in this crate.
    pub const ALL: [Self; 17] = [
        Self::Cast,
        Self::PrimitivesCheck,
        Self::AdamW,
        Self::Accumulate,
        Self::GradNorm,
        Self::Norm,
        Self::Attention,
        Self::AttentionPlain,
        Self::LoraLinear,
        Self::LoraGradients,
        Self::LinearParts,
        Self::MatmulPlain,
        Self::Pointwise,
        Self::Rows,
        Self::RowSums,
        Self::Loss,
        Self::Unpack,
    ];

    /// Name of the family's CUDA source file without extension, e.g. `adamw`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cast => "cast",
            Self::PrimitivesCheck => "primitives_check",
            Self::AdamW => "adamw",
            Self::Accumulate => "accumulate",
            Self::GradNorm => "grad_norm",
            Self::Norm => "norm",
            Self::Attention => "attention",
            Self::AttentionPlain => "attention_plain",
            Self::LoraLinear => "lora_linear",
            Self::LoraGradients => "lora_gradients",
            Self::LinearParts => "linear_parts",
            Self::MatmulPlain => "matmul_plain",
            Self::Pointwise => "pointwise",
            Self::Rows => "rows",
            Self::RowSums => "row_sums",
            Self::Loss => "loss",
            Self::Unpack => "unpack",
        }
    }

    /// CUDA source text of the family, without primitives, prelude and defines.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Cast => include_str!("source/cast.cu"),
            Self::PrimitivesCheck => include_str!("source/primitives_check.cu"),
            Self::AdamW => with_headers!(
                "source/rounding.cuh",
                "source/dynamic_map.cuh",
                "source/adamw.cu"
            ),
            Self::Accumulate => with_headers!("source/rounding.cuh", "source/accumulate.cu"),
            Self::GradNorm => include_str!("source/grad_norm.cu"),
            Self::Norm => include_str!("source/norm.cu"),
            Self::Attention => include_str!("source/attention.cu"),
            Self::AttentionPlain => include_str!("source/attention_plain.cu"),
            Self::LoraLinear => include_str!("source/lora_linear.cu"),
            Self::LoraGradients => include_str!("source/lora_gradients.cu"),
            Self::LinearParts => include_str!("source/linear_parts.cu"),
            Self::MatmulPlain => include_str!("source/matmul_plain.cu"),
            Self::Pointwise => include_str!("source/pointwise.cu"),
            Self::Rows => include_str!("source/rows.cu"),
            Self::RowSums => include_str!("source/row_sums.cu"),
            Self::Loss => include_str!("source/loss.cu"),
            Self::Unpack => with_headers!("source/dynamic_map.cuh", "source/unpack.cu"),
        }
    }

    /// Modules of the family that this crate launches: its source with each set of defines in use. All are
    /// built in as PTX. Attention with a head dim that no supported model has is compiled on demand.
    #[must_use]
    pub fn modules(self) -> Vec<Module> {
        match self {
            Self::Cast => super::ops::cast::modules(),
            Self::PrimitivesCheck => super::ops::primitives_check::modules(),
            Self::AdamW => super::ops::adamw::modules(),
            Self::Accumulate => super::ops::accumulate::modules(),
            Self::GradNorm => super::ops::grad_norm::modules(),
            Self::Norm => super::ops::norm::modules(),
            Self::Attention => super::ops::attention::modules(),
            Self::AttentionPlain => super::ops::attention::plain_modules(),
            Self::LoraLinear => super::ops::lora_linear::modules(),
            Self::LoraGradients => super::ops::lora_gradients::modules(),
            Self::LinearParts => super::ops::lora_linear::parts_modules(),
            Self::MatmulPlain => super::ops::matmul_plain::modules(),
            Self::Pointwise => super::ops::pointwise::modules(),
            Self::Rows => super::ops::rows::modules(),
            Self::RowSums => super::ops::rows::sum_modules(),
            Self::Loss => super::ops::loss::modules(),
            Self::Unpack => super::ops::unpack::modules(),
        }
    }
}

/// Number that stands for a dtype in a preprocessor define: 0 for f32, 1 for bf16, 2 for f16. `None` for
/// other dtypes.
#[must_use]
pub const fn element_type(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F32 => Some(0),
        DType::BF16 => Some(1),
        DType::F16 => Some(2),
        _ => None,
    }
}

/// Family of this crate, or source text of another crate.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum AnyFamily {
    Own(Family),
    Foreign { name: &'static str, text: String },
}

/// Every launch hashes its module, so a long source text counts by its name alone.
impl Hash for AnyFamily {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        match self {
            Self::Own(family) => family.hash(hasher),
            Self::Foreign { name, .. } => name.hash(hasher),
        }
    }
}

impl AnyFamily {
    const fn name(&self) -> &'static str {
        match self {
            Self::Own(family) => family.name(),
            Self::Foreign { name, .. } => name,
        }
    }

    fn text(&self) -> &str {
        match self {
            Self::Own(family) => family.text(),
            Self::Foreign { text, .. } => text,
        }
    }
}

/// CUDA source text with the values of its preprocessor defines: the unit of compilation.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Module {
    family: AnyFamily,
    defines: Vec<(&'static str, u32)>,
    kernels: &'static [&'static str],
}

impl Module {
    /// Module of `family` with these preprocessor defines. `kernels` are the names of the kernels that it
    /// contains.
    #[must_use]
    pub fn new(
        family: Family,
        defines: impl Into<Vec<(&'static str, u32)>>,
        kernels: &'static [&'static str],
    ) -> Self {
        Self {
            family: AnyFamily::Own(family),
            defines: defines.into(),
            kernels,
        }
    }

    /// Module called `name` whose CUDA source `text` comes from another crate and contains the kernels named
    /// `kernels`. The text can call the device functions that this crate's kernels share.
    #[must_use]
    pub fn foreign(
        name: &'static str,
        text: impl Into<String>,
        kernels: &'static [&'static str],
    ) -> Self {
        let text = text.into();
        Self {
            family: AnyFamily::Foreign { name, text },
            defines: Vec::new(),
            kernels,
        }
    }

    /// Kernel family of the module. `None` if its source text comes from another crate.
    #[must_use]
    pub const fn family(&self) -> Option<Family> {
        match self.family {
            AnyFamily::Own(family) => Some(family),
            AnyFamily::Foreign { .. } => None,
        }
    }

    /// Names of the kernels that the module contains.
    #[must_use]
    pub const fn kernels(&self) -> &'static [&'static str] {
        self.kernels
    }

    /// Name of the module's file without extension, e.g. `cast-from0-to1`: the family and its defines.
    #[must_use]
    pub fn name(&self) -> String {
        let choices = self.defines.iter();
        let choices = choices.map(|(define, value)| format!("-{}{value}", define.to_lowercase()));
        choices.fold(self.family.name().to_owned(), |name, choice| name + &choice)
    }

    /// CUDA source text of the module without primitives and prelude: its defines, then the family's text.
    #[must_use]
    pub fn body(&self) -> String {
        let defines = self.defines.iter();
        let defines = defines.map(|(define, value)| format!("#define {define} {value}\n"));
        defines.collect::<String>() + self.family.text()
    }

    /// Complete source text for NVRTC: primitives, prelude, defines, and the family's text.
    #[must_use]
    pub fn source(&self) -> String {
        format!("{PRIMITIVES}\n{PRELUDE}\n{}", self.body())
    }
}
