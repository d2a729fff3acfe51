//! `config.json` of MiniCPM-V and MiniCPM-o, releases 2.6, 4.0 and 4.5, checked once, so that model code does not have to.

use crate::config::{
    ConfigError, Fields, HeadDim, LanguageConfig, LanguageKeys, MAX_GRID, Rope, at_most, divisible,
    grid, reads_config_json, size, unsupported,
};
use crate::families::NEW_MINICPM;
use serde_json::Value;

/// Elements of one head of the resampler's attention, which has `hidden_size / 128` heads.
pub const RESAMPLER_HEAD_DIM: usize = 128;
/// Side of a slice's area in the published checkpoints, absent from their `config.json`.
const DEFAULT_SCALE_RESOLUTION: usize = 448;
/// Slices per image of the published checkpoints.
const DEFAULT_MAX_SLICES: usize = 9;

/// Which published family a checkpoint belongs to: MiniCPM-V or MiniCPM-o.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// MiniCPM-V: `vpm`, `resampler`, `llm`.
    Vision,
    /// MiniCPM-o: the same three parts; its audio and speech tensors are ignored.
    Omni,
}

/// Release of a MiniCPM-V or MiniCPM-o, the `version` of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// 2.6, whose decoder is Qwen2.
    V2_6,
    /// 4.0 of MiniCPM-V, whose decoder is MiniCPM4: Llama's, with factors on its rotary wavelengths (longrope).
    V4_0,
    /// 4.5, whose decoder is Qwen3. Its template writes thoughts, and frames of a video may share features.
    V4_5,
}

/// Configuration of a MiniCPM-V or MiniCPM-o model.
#[derive(Clone, Debug, PartialEq)]
pub struct MiniCpmConfig {
    /// Whether the checkpoint is a MiniCPM-V or a MiniCPM-o.
    pub family: Family,
    /// Release of the checkpoint.
    pub release: Release,
    /// Sizes of the language decoder.
    pub language: LanguageConfig,
    /// Factors on the wavelengths of the rotary position embedding, in release 4.0.
    pub long_rope: Option<LongRope>,
    /// Whether the output head uses the weight of the token embedding.
    pub tie_word_embeddings: bool,
    /// Sizes of the SigLIP vision tower.
    pub vision: VisionConfig,
    /// Number of image tokens per slice, which is the number of the resampler's queries.
    pub query_num: usize,
    /// Whether the vision tower is built without its last layer.
    pub drop_vision_last_layer: bool,
    /// Largest number of slices that the vision tower takes at once in the published code; results do not depend on
    /// it.
    pub vision_batch_size: usize,
    /// Whether images get a number (image id) in the prompt.
    pub use_image_id: bool,
    /// Rules by which large images are cut into cells.
    pub slicing: SlicingConfig,
}

/// Factors on the wavelengths of a rotary position embedding (`longrope`).
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Factor of each rotating pair of a head (`short_factor`).
    pub factors: Vec<f64>,
    /// Most tokens of a sample for which these factors hold; `None` if longer ones have the same (`long_factor`).
    pub most_tokens: Option<usize>,
}

/// Sizes of the SigLIP vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Width of the tower's residual stream: elements per patch.
    pub hidden_size: usize,
    /// Inner width of the MLP in each layer.
    pub intermediate_size: usize,
    /// Number of transformer layers that the model has: one less than in the file if the last is dropped.
    pub num_layers: usize,
    /// Number of attention heads per layer.
    pub num_heads: usize,
    /// Elements of one attention head.
    pub head_dim: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Number of learned position embeddings along each side of their square grid.
    pub grid_side: usize,
    /// Epsilon that every LayerNorm of the tower adds to the variance.
    pub layer_norm_eps: f64,
}

/// Rules by which large images are cut into cells; each cell is a slice, an input of the vision tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlicingConfig {
    /// Largest number of cells of an image, without the overview; 1 means that images are never cut.
    pub max_slice_nums: usize,
    /// Size that slices aim at: side, in pixels, of a square with about the area of a slice.
    pub scale_resolution: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
}

reads_config_json!(MiniCpmConfig);

impl MiniCpmConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        // The family first: a file of another family may lack any other field.
        let (family, release) = Family::read(fields)?;
        check_supported(fields)?;
        let text = fields.language()?;
        let rope = release.rope(text)?;
        // The class default, used where a file has no value.
        let language =
            LanguageConfig::read(text, &release.keys(), rope.number("rope_theta", 1e4)?)?;
        let drop_vision_last_layer = fields.flag("drop_vision_last_layer", true)?;
        let vision = VisionConfig::read(fields, drop_vision_last_layer)?;
        let config = Self {
            family,
            release,
            long_rope: LongRope::read(text, &rope, language.head_dim)?,
            tie_word_embeddings: fields.flag_of_both("tie_word_embeddings", text)?,
            language,
            slicing: SlicingConfig::read(fields, vision.patch_size)?,
            vision,
            query_num: fields.size("query_num")?,
            drop_vision_last_layer,
            vision_batch_size: fields.size_or("vision_batch_size", 16)?,
            use_image_id: fields.flag("use_image_id", true)?,
        };
        config.check()?;
        Ok(config)
    }

    /// Whether the resampler takes frames of a video with their times.
    #[must_use]
    pub fn takes_videos(&self) -> bool {
        self.release == Release::V4_5 && self.family == Family::Vision
    }

    /// Number of heads of the resampler's attention.
    pub fn resampler_heads(&self) -> usize {
        self.language.hidden_size / RESAMPLER_HEAD_DIM
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (language, vision) = (&self.language, &self.vision);
        divisible("hidden_size", language.hidden_size, RESAMPLER_HEAD_DIM)?;
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

impl Family {
    fn read(fields: Fields<'_>) -> Result<(Self, Release), ConfigError> {
        let model_type: String = fields.nullable("model_type")?.unwrap_or_default();
        let family = match model_type.as_str() {
            "minicpmv" => Self::Vision,
            "minicpmo" => Self::Omni,
            _ => return Err(ConfigError::UnsupportedModel { found: model_type }),
        };
        let sizes = [
            fields.nullable("hidden_size")?,
            fields.nullable("query_num")?,
        ];
        let found = match fields.optional("version")? {
            Some(Value::String(text)) => text,
            Some(other) => other.to_string(),
            // The first releases carried no version.
            None if family == Self::Omni => "without a version".to_owned(),
            None if sizes == [Some(2304), Some(64)] => "2.0 (no version field)".to_owned(),
            None => "2.5 (no version field)".to_owned(),
        };
        match found.as_str() {
            "2.6" => Ok((family, Release::V2_6)),
            "4.0" | "4" if family == Self::Vision => Ok((family, Release::V4_0)),
            "4.5" => Ok((family, Release::V4_5)),
            _ => {
                let (letter, nearest) = match family {
                    Self::Vision => ('V', "MiniCPM-V 4.5"),
                    Self::Omni => ('o', "MiniCPM-o 4.5"),
                };
                Err(ConfigError::KnownCheckpoint {
                    name: format!("MiniCPM-{letter} {found}"),
                    reason: lacking(&found),
                    nearest,
                })
            }
        }
    }
}

/// What this program lacks for the release `version`.
fn lacking(version: &str) -> &'static str {
    match version.split(' ').next() {
        Some("2.0") => "its tower, resampler and decoder (MiniCPM-2.4B) are other ones",
        Some("2.5") => "its decoder is Llama 3 with a prompt of its own",
        Some("4.6") => NEW_MINICPM,
        Some("without") => "its release decides what it computes",
        _ => "its layout is not implemented",
    }
}

fn check_supported(fields: Fields<'_>) -> Result<(), ConfigError> {
    fields.expect::<String>("vision_config.hidden_act", "gelu_pytorch_tanh")?;
    fields.expect_flag("batch_vision_input", true)?;
    fields.no_dropout("vision_config.attention_dropout")
}

impl Release {
    /// Names of the fields of the language model.
    fn keys(self) -> LanguageKeys {
        LanguageKeys {
            head_dim: match self {
                Self::V2_6 => HeadDim::Implied,
                Self::V4_0 => HeadDim::Own("head_dim", None),
                // The class default.
                Self::V4_5 => HeadDim::Own("head_dim", Some(128)),
            },
            ..LanguageKeys::TRANSFORMERS
        }
    }

    /// Rotary settings of the decoder. Fails if it computes anything else than that of this release.
    fn rope(self, fields: Fields<'_>) -> Result<Rope<'_>, ConfigError> {
        fields.expect_flag("use_sliding_window", false)?;
        let rope = match self {
            Self::V4_0 => Rope::read_kinds(fields, &["default", "longrope"])?,
            _ => Rope::read(fields)?,
        };
        rope.constant("partial_rotary_factor", 1.0)?;
        if self == Self::V4_0 {
            check_unscaled(fields)?;
        }
        if !self.has_qkv_bias() {
            fields.expect_flag("attention_bias", false)?;
        }
        Ok(rope)
    }

    /// Whether queries, keys and values have a bias.
    pub(super) fn has_qkv_bias(self) -> bool {
        self == Self::V2_6
    }

    /// Whether query and key heads have RMSNorms of their own.
    pub(super) fn has_head_norms(self) -> bool {
        self == Self::V4_5
    }
}

/// Fails if the decoder of release 4.0 has a scaling. The published class ignores these fields except the first, and MiniCPM4
/// does not, so that only weights could tell what a value means.
fn check_unscaled(fields: Fields<'_>) -> Result<(), ConfigError> {
    fields.expect_flag("mlp_bias", false)?;
    for field in ["scale_emb", "scale_depth", "dim_model_base"] {
        if fields
            .nullable::<f64>(field)?
            .is_some_and(|found| found != 1.0)
        {
            return Err(ConfigError::KnownCheckpoint {
                name: format!("MiniCPM-V 4.0 with {field}"),
                reason: "its decoder has scalings that were not compared with its weights",
                nearest: "MiniCPM-V 4.5",
            });
        }
    }
    Ok(())
}

impl LongRope {
    /// The factors of `rope`, if it is of the type longrope, for heads of `head_dim` elements.
    fn read(
        fields: Fields<'_>,
        rope: &Rope<'_>,
        head_dim: usize,
    ) -> Result<Option<Self>, ConfigError> {
        let kinds = [
            rope.own::<String>("rope_type")?,
            rope.own::<String>("type")?,
        ];
        if !kinds.iter().flatten().any(|kind| kind == "longrope") {
            return Ok(None);
        }
        let factors =
            |field: &'static str| -> Result<Vec<f64>, ConfigError> {
                let factors = rope.own::<Vec<f64>>(field)?;
                let factors =
                    factors.ok_or_else(|| fields.invalid(format!("longrope without {field}")))?;
                let are_good = factors.iter().all(|f| f.is_finite() && *f > 0.0);
                match factors.len() == head_dim / 2 && are_good {
                    true => Ok(factors),
                    false => Err(fields
                        .invalid(format!("{field} must be {} positive numbers", head_dim / 2))),
                }
            };
        let (short, long) = (factors("short_factor")?, factors("long_factor")?);
        let original = rope.own::<usize>("original_max_position_embeddings")?;
        let original = original.ok_or_else(|| {
            fields.invalid("longrope without original_max_position_embeddings".to_owned())
        })?;
        let original = size("rope_scaling.original_max_position_embeddings", original)?;
        // With these, cosines and sines have a factor too.
        let grows = rope.own::<f64>("factor")?.is_some_and(|f| f > 1.0)
            || fields.size("max_position_embeddings")? > original;
        let given = rope.own::<f64>("attention_factor")?;
        if given.map_or(grows, |factor| factor != 1.0) {
            return Err(unsupported(
                "rope_scaling",
                "longrope beyond original_max_position_embeddings".to_owned(),
                "longrope up to it, without attention_factor",
            ));
        }
        Ok(Some(Self {
            most_tokens: (short != long).then_some(original),
            factors: short,
        }))
    }
}

impl VisionConfig {
    fn read(fields: Fields<'_>, drop_last: bool) -> Result<Self, ConfigError> {
        const WIDTH: &str = "vision_config.hidden_size";
        let num_layers = fields.size("vision_config.num_hidden_layers")?;
        let patch_size = fields.size("vision_config.patch_size")?;
        let image_size = fields.size("vision_config.image_size")?;
        let hidden_size = fields.size(WIDTH)?;
        let num_heads = fields.size("vision_config.num_attention_heads")?;
        Ok(Self {
            hidden_size,
            intermediate_size: fields.size("vision_config.intermediate_size")?,
            num_layers: num_layers - usize::from(drop_last),
            num_heads,
            head_dim: divisible(WIDTH, hidden_size, num_heads)?,
            patch_size,
            // A partial patch at the border is cut off, as a convolution does.
            grid_side: grid(
                "vision_config.image_size / patch_size",
                image_size - image_size % patch_size,
                patch_size,
            )?,
            layer_norm_eps: fields.positive_or("vision_config.layer_norm_eps", 1e-6)?,
        })
    }
}

impl SlicingConfig {
    /// `patch_size` is the tower's.
    fn read(fields: Fields<'_>, patch_size: usize) -> Result<Self, ConfigError> {
        const SCALE: &str = "slice_config.scale_resolution";
        let most = fields.size_or("slice_config.max_slice_nums", DEFAULT_MAX_SLICES)?;
        let slices = fields.flag("slice_mode", true)?;
        let scale_resolution = fields.size_or(SCALE, DEFAULT_SCALE_RESOLUTION)?;
        let patch_size = fields.size_or("slice_config.patch_size", patch_size)?;
        let side = scale_resolution / patch_size;
        at_most("slice_config.scale_resolution / patch_size", side, MAX_GRID)?;
        Ok(Self {
            max_slice_nums: if slices { most } else { 1 },
            scale_resolution,
            patch_size,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::path::Path;

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
    fn published_configurations_have_their_sizes_and_class_defaults() {
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
        assert!(with("/version", json!(4.5)).is_ok());
        assert!(with("/version", json!("4.5")).is_ok());
        for (version, name) in [
            (json!(4.1), "MiniCPM-V 4.1"),
            (json!("4.6"), "MiniCPM-V 4.6"),
        ] {
            let error = with("/version", version).unwrap_err();
            assert!(
                matches!(&error, ConfigError::KnownCheckpoint { .. }),
                "{error}"
            );
            let text = error.to_string();
            assert!(
                text.contains(name) && text.contains("MiniCPM-V 4.5"),
                "{text}"
            );
        }
        let mut config = base();
        config.as_object_mut().unwrap().shift_remove("version");
        assert!(parse(&config).unwrap_err().to_string().contains("2.5"));
        config["model_type"] = json!("minicpmo");
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains("MiniCPM-o without a version"), "{error}");
    }

    /// A decoder of release 4.0 with `scaling` as its `rope_scaling`.
    fn release_4_0(scaling: &Value) -> Value {
        let mut config = base();
        config["version"] = json!(4.0);
        config["head_dim"] = json!(8);
        config["max_position_embeddings"] = json!(64);
        config["rope_scaling"] = scaling.clone();
        config
    }

    fn longrope() -> Value {
        json!({
            "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 4.0],
            "long_factor": [1.0, 1.5, 2.0, 4.0], "original_max_position_embeddings": 64
        })
    }

    #[test]
    fn release_4_0_has_factors_of_its_rotary_wavelengths() {
        let config = parse(&release_4_0(&longrope())).unwrap();
        assert!(!config.release.has_qkv_bias() && !config.release.has_head_norms());
        let found = config.long_rope.unwrap();
        assert_eq!(
            (&found.factors[..], found.most_tokens),
            (&[1.0, 1.5, 2.0, 4.0][..], None)
        );
        let mut other = longrope();
        other["long_factor"][3] = json!(8.0);
        let found = parse(&release_4_0(&other)).unwrap().long_rope;
        assert_eq!(found.unwrap().most_tokens, Some(64));
        let plain = parse(&release_4_0(&Value::Null)).unwrap();
        assert_eq!(plain.long_rope, None);
        assert!(with("/rope_scaling", longrope()).is_err(), "release 2.6");
    }

    #[test]
    fn what_release_4_0_may_mean_is_refused_until_it_was_compared() {
        for (field, value) in [
            ("scale_emb", json!(12)),
            ("scale_depth", json!(1.4)),
            ("dim_model_base", json!(256)),
        ] {
            let mut config = release_4_0(&longrope());
            config[field] = value;
            let error = parse(&config).unwrap_err().to_string();
            assert!(
                error.contains("MiniCPM-V 4.0") && error.contains(field),
                "{error}"
            );
            config[field] = json!(1);
            assert!(parse(&config).is_ok(), "{field}");
        }
        for (field, value) in [
            ("attention_factor", json!(1.2)),
            ("factor", json!(4.0)),
            ("original_max_position_embeddings", json!(32)),
            ("original_max_position_embeddings", Value::Null),
            ("short_factor", json!([1.0, 1.5, 2.0])),
            ("long_factor", json!([1.0, 1.5, 2.0, 0.0])),
            ("rope_type", json!("yarn")),
        ] {
            let mut scaling = longrope();
            scaling[field] = value;
            assert!(parse(&release_4_0(&scaling)).is_err(), "{field}");
        }
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
