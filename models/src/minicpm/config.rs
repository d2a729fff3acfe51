//! Reader of `config.json` of MiniCPM-V 2.6 and MiniCPM-o 2.6. It checks everything once, so the model code need not.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::config::{
    self, ConfigError, at_most, divisible, expect, no_dropout, positive, size, unsupported,
};

/// Elements per head of the resampler's attention, which has `hidden_size / 128` heads.
pub const RESAMPLER_HEAD_DIM: usize = 128;
/// The only supported release of the family.
const SUPPORTED_VERSION: &str = "2.6";
/// `scale_resolution` of the published checkpoints, whose `config.json` omits it.
const DEFAULT_SCALE_RESOLUTION: usize = 448;
/// `max_slice_nums` of the published checkpoints.
const DEFAULT_MAX_SLICES: usize = 9;

/// Published family of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// MiniCPM-V: modules `vpm`, `resampler`, `llm`.
    Vision,
    /// MiniCPM-o: the same three modules; its audio and speech tensors are ignored.
    Omni,
}

/// Configuration of the whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct MiniCpmConfig {
    /// MiniCPM-V or MiniCPM-o.
    pub family: Family,
    /// Sizes of the Qwen2 decoder.
    pub language: LanguageConfig,
    /// Sizes of the SigLIP vision tower.
    pub vision: VisionConfig,
    /// Image tokens per slice: queries of the resampler.
    pub query_num: usize,
    /// Whether the vision tower is built without its last layer.
    pub drop_vision_last_layer: bool,
    /// Slices per chunk of the vision tower in the reference implementation; no effect on the values.
    pub vision_batch_size: usize,
    /// Whether images are numbered in the prompt.
    pub use_image_id: bool,
    /// Settings of image slicing.
    pub slicing: SlicingConfig,
}

/// Sizes of the Qwen2 decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the output head shares the weight of the embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of random initial values.
    pub initializer_range: f64,
}

/// Sizes of the SigLIP vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of layers that are built: one less than in the file if the last is dropped.
    pub num_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Learned positions per side of the position grid.
    pub grid_side: usize,
    /// Epsilon of every LayerNorm.
    pub layer_norm_eps: f64,
}

/// Settings of image slicing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlicingConfig {
    /// Maximal number of cells per image, in addition to the overview; 1 means no cells.
    pub max_slice_nums: usize,
    /// Side in pixels of the square whose area a slice has approximately.
    pub scale_resolution: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
}

impl MiniCpmConfig {
    /// Reads `config.json` of the model directory `dir`.
    ///
    /// # Errors
    /// [`ConfigError`] if the file is missing or invalid, or describes a model that is not supported.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        let (bytes, path) = config::read(dir)?;
        Self::parse(&bytes, &path)
    }

    /// Parses the content of a `config.json`; `path` appears in errors.
    ///
    /// # Errors
    /// As [`MiniCpmConfig::load`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let invalid = |source| ConfigError::Json {
            path: path.to_owned(),
            source,
        };
        // The family is checked first, since a file of another family may lack any other field.
        let head: Head = serde_json::from_slice(bytes).map_err(invalid)?;
        let family = head.family()?;
        let raw: Raw = serde_json::from_slice(bytes).map_err(invalid)?;
        raw.check_supported()?;
        let config = raw.resolve(family)?;
        config.check()?;
        Ok(config)
    }

    /// Number of heads of the resampler's attention.
    pub fn resampler_heads(&self) -> usize {
        self.language.hidden_size / RESAMPLER_HEAD_DIM
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (language, vision) = (&self.language, &self.vision);
        divisible(
            "num_attention_heads",
            language.num_heads,
            language.num_kv_heads,
        )?;
        // Rotary embedding pairs the two halves of a head.
        divisible("hidden_size / num_attention_heads", language.head_dim, 2)?;
        divisible("hidden_size", language.hidden_size, RESAMPLER_HEAD_DIM)?;
        at_most("hidden_size / num_attention_heads", language.head_dim, 128)?;
        at_most(
            "vision_config.hidden_size / num_attention_heads",
            vision.head_dim,
            128,
        )?;
        if vision.patch_size != self.slicing.patch_size {
            return Err(ConfigError::Inconsistent {
                field: "slice_config.patch_size",
                found: self.slicing.patch_size,
                reason: format!("vision_config.patch_size is {}", vision.patch_size),
            });
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    model_type: String,
    version: Option<Value>,
    hidden_size: Option<usize>,
    query_num: Option<usize>,
}

impl Head {
    fn family(&self) -> Result<Family, ConfigError> {
        let family = match self.model_type.as_str() {
            "minicpmv" => Family::Vision,
            "minicpmo" => Family::Omni,
            _ => {
                return Err(ConfigError::UnsupportedModel {
                    found: self.model_type.clone(),
                });
            }
        };
        let found = match &self.version {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            // The first releases have no version field.
            None if self.hidden_size == Some(2304) && self.query_num == Some(64) => {
                "2.0 (no version field)".to_owned()
            }
            None => "2.5 (no version field)".to_owned(),
        };
        if found == SUPPORTED_VERSION {
            return Ok(family);
        }
        Err(ConfigError::UnsupportedVersion {
            model_type: self.model_type.clone(),
            found,
            expected: SUPPORTED_VERSION,
        })
    }
}

#[derive(Deserialize)]
struct Raw {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    vocab_size: usize,
    rms_norm_eps: f64,
    initializer_range: Option<f64>,
    rope_theta: Option<f64>,
    rope_parameters: Option<RopeParameters>,
    rope_scaling: Option<Value>,
    hidden_act: Option<String>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    use_sliding_window: bool,
    #[serde(default)]
    attention_dropout: f64,
    query_num: usize,
    #[serde(default = "yes")]
    drop_vision_last_layer: bool,
    #[serde(default = "sixteen")]
    vision_batch_size: usize,
    #[serde(default = "yes")]
    use_image_id: bool,
    #[serde(default = "yes")]
    slice_mode: bool,
    #[serde(default = "yes")]
    batch_vision_input: bool,
    slice_config: Option<RawSlicing>,
    vision_config: RawVision,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

#[derive(Deserialize, Default)]
struct RawSlicing {
    max_slice_nums: Option<usize>,
    patch_size: Option<usize>,
    scale_resolution: Option<usize>,
}

#[derive(Deserialize)]
struct RawVision {
    hidden_size: usize,
    image_size: usize,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_hidden_layers: usize,
    patch_size: usize,
    #[serde(default = "layer_norm_eps")]
    layer_norm_eps: f64,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_dropout: f64,
}

fn yes() -> bool {
    true
}

fn sixteen() -> usize {
    16
}

fn layer_norm_eps() -> f64 {
    1e-6
}

impl Raw {
    fn check_supported(&self) -> Result<(), ConfigError> {
        let vision = &self.vision_config;
        let rope = self.rope_parameters.as_ref();
        let rope_type = rope.and_then(|rope| rope.rope_type.as_deref());
        expect("hidden_act", self.hidden_act.as_deref(), "silu")?;
        expect(
            "vision_config.hidden_act",
            vision.hidden_act.as_deref(),
            "gelu_pytorch_tanh",
        )?;
        expect("rope_parameters.rope_type", rope_type, "default")?;
        let scaling = self.rope_scaling.as_ref().map(Value::to_string);
        expect("rope_scaling", scaling.as_deref(), "null")?;
        if self.use_sliding_window {
            return Err(unsupported(
                "use_sliding_window",
                "true".to_owned(),
                "false",
            ));
        }
        if !self.batch_vision_input {
            return Err(unsupported(
                "batch_vision_input",
                "false".to_owned(),
                "true",
            ));
        }
        no_dropout("attention_dropout", self.attention_dropout)?;
        no_dropout("vision_config.attention_dropout", vision.attention_dropout)
    }

    fn resolve(self, family: Family) -> Result<MiniCpmConfig, ConfigError> {
        let rope_theta = self
            .rope_theta
            .or(self.rope_parameters.and_then(|rope| rope.rope_theta));
        let language = LanguageConfig {
            hidden_size: size("hidden_size", self.hidden_size)?,
            intermediate_size: size("intermediate_size", self.intermediate_size)?,
            num_layers: size("num_hidden_layers", self.num_hidden_layers)?,
            num_heads: size("num_attention_heads", self.num_attention_heads)?,
            num_kv_heads: size("num_key_value_heads", self.num_key_value_heads)?,
            head_dim: divisible("hidden_size", self.hidden_size, self.num_attention_heads)?,
            vocab_size: size("vocab_size", self.vocab_size)?,
            rms_norm_eps: positive("rms_norm_eps", self.rms_norm_eps)?,
            // Default of the reference class, for files that omit it.
            rope_theta: positive("rope_theta", rope_theta.unwrap_or(1e4))?,
            tie_word_embeddings: self.tie_word_embeddings,
            initializer_range: positive(
                "initializer_range",
                self.initializer_range.unwrap_or(0.02),
            )?,
        };
        let slices = self.slice_config.unwrap_or_default();
        let max_slice_nums = slices.max_slice_nums.unwrap_or(DEFAULT_MAX_SLICES);
        let scale = slices.scale_resolution.unwrap_or(DEFAULT_SCALE_RESOLUTION);
        let patch_size = slices.patch_size.unwrap_or(self.vision_config.patch_size);
        Ok(MiniCpmConfig {
            family,
            language,
            vision: self.vision_config.resolve(self.drop_vision_last_layer)?,
            query_num: size("query_num", self.query_num)?,
            drop_vision_last_layer: self.drop_vision_last_layer,
            vision_batch_size: size("vision_batch_size", self.vision_batch_size)?,
            use_image_id: self.use_image_id,
            slicing: SlicingConfig {
                max_slice_nums: if self.slice_mode { max_slice_nums } else { 1 },
                scale_resolution: size("slice_config.scale_resolution", scale)?,
                patch_size: size("slice_config.patch_size", patch_size)?,
            },
        })
    }
}

impl RawVision {
    fn resolve(self, drop_last: bool) -> Result<VisionConfig, ConfigError> {
        const HEADS: &str = "vision_config.num_attention_heads";
        let layers = size("vision_config.num_hidden_layers", self.num_hidden_layers)?;
        let patch_size = size("vision_config.patch_size", self.patch_size)?;
        // The grid is as wide as the image in patches; a remainder is cut off, as in a convolution.
        let grid_side = size(
            "vision_config.image_size / patch_size",
            self.image_size / patch_size,
        )?;
        Ok(VisionConfig {
            hidden_size: size("vision_config.hidden_size", self.hidden_size)?,
            intermediate_size: size("vision_config.intermediate_size", self.intermediate_size)?,
            num_layers: if drop_last { layers - 1 } else { layers },
            num_heads: size(HEADS, self.num_attention_heads)?,
            head_dim: divisible(
                "vision_config.hidden_size",
                self.hidden_size,
                self.num_attention_heads,
            )?,
            patch_size,
            grid_side,
            layer_norm_eps: positive("vision_config.layer_norm_eps", self.layer_norm_eps)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn base() -> Value {
        json!({
            "version": 2.6, "model_type": "minicpmv", "hidden_size": 3584,
            "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "vocab_size": 151_666, "query_num": 64, "drop_vision_last_layer": false,
            "slice_config": {"max_slice_nums": 9, "patch_size": 14},
            "vision_config": {
                "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304,
                "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14
            }
        })
    }

    fn parse(value: &Value) -> Result<MiniCpmConfig, ConfigError> {
        MiniCpmConfig::parse(value.to_string().as_bytes(), Path::new("config.json"))
    }

    fn with(pointer: &str, value: Value) -> Result<MiniCpmConfig, ConfigError> {
        let mut config = base();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[key] = value;
        parse(&config)
    }

    #[test]
    fn published_sizes_and_class_defaults() {
        let config = parse(&base()).unwrap();
        assert_eq!(config.resampler_heads(), 28);
        assert_eq!(
            (config.language.head_dim, config.vision.head_dim),
            (128, 72)
        );
        assert_eq!(
            (config.vision.grid_side, config.vision.num_layers),
            (70, 27)
        );
        assert_eq!(config.slicing.scale_resolution, 448);
        assert_eq!(config.vision.layer_norm_eps, 1e-6);
        assert!(config.use_image_id);
    }

    #[test]
    fn the_last_vision_layer_is_dropped_unless_the_file_says_no() {
        let mut config = base();
        config
            .as_object_mut()
            .unwrap()
            .shift_remove("drop_vision_last_layer");
        assert_eq!(parse(&config).unwrap().vision.num_layers, 26);
    }

    #[test]
    fn without_slice_mode_images_are_not_sliced() {
        assert_eq!(
            with("/slice_mode", json!(false))
                .unwrap()
                .slicing
                .max_slice_nums,
            1
        );
    }

    #[test]
    fn the_version_may_be_text_and_unknown_versions_are_named() {
        assert!(with("/version", json!("2.6")).is_ok());
        let error = with("/version", json!(4.5)).unwrap_err();
        assert!(matches!(error, ConfigError::UnsupportedVersion { found, .. } if found == "4.5"));
        let mut config = base();
        config.as_object_mut().unwrap().shift_remove("version");
        assert!(parse(&config).unwrap_err().to_string().contains("2.5"));
    }

    #[test]
    fn other_families_are_rejected_by_name_whatever_else_they_lack() {
        let error = parse(&json!({"model_type": "llava"})).unwrap_err();
        assert!(matches!(error, ConfigError::UnsupportedModel { found } if found == "llava"));
        assert!(matches!(
            parse(&json!({})),
            Err(ConfigError::UnsupportedModel { .. })
        ));
    }

    #[test]
    fn unsupported_configurations_are_refused() {
        for (pointer, value) in [
            ("/use_sliding_window", json!(true)),
            ("/hidden_act", json!("gelu")),
            ("/rope_scaling", json!({"type": "yarn"})),
            ("/attention_dropout", json!(0.1)),
            ("/vision_config/hidden_act", json!("gelu")),
            ("/batch_vision_input", json!(false)),
        ] {
            let result = with(pointer, value);
            assert!(
                matches!(result, Err(ConfigError::Unsupported { .. })),
                "{pointer}: {result:?}"
            );
        }
        assert!(with("/rope_scaling", Value::Null).is_ok());
    }

    #[test]
    fn impossible_sizes_are_errors_not_panics() {
        for (pointer, value) in [
            ("/num_attention_heads", json!(0)),
            ("/num_attention_heads", json!(27)),
            ("/num_key_value_heads", json!(3)),
            ("/hidden_size", json!(28)),
            ("/vocab_size", json!(u64::MAX)),
            ("/vision_config/patch_size", json!(0)),
            ("/vision_config/image_size", json!(13)),
            ("/slice_config/patch_size", json!(16)),
        ] {
            let result = with(pointer, value);
            let impossible = matches!(result, Err(ConfigError::Inconsistent { .. }));
            assert!(impossible, "{pointer}: {result:?}");
        }
        let error = with("/vocab_size", json!(-1)).unwrap_err();
        assert!(matches!(error, ConfigError::Json { .. }));
    }
}
