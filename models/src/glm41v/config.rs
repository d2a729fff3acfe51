//! `config.json` of GLM-4.1V, in its nested and its flat layout, checked once, so that model code does not have to.

use crate::config::{
    ConfigError, ConfigFile, Fields, at_most, divisible, expect, positive, size, unsupported,
};
use std::path::Path;

/// Configuration of a GLM-4.1V model.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm41vConfig {
    /// Sizes of the language decoder.
    pub language: LanguageConfig,
    /// Sizes of the vision tower and its merger.
    pub vision: VisionConfig,
    /// Ids of the tokens that end an answer.
    pub eos_ids: Vec<i32>,
}

/// Sizes of the language decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageConfig {
    /// Width of the decoder's residual stream: elements of one token's hidden state.
    pub hidden_size: usize,
    /// Inner width of the gated MLP in each block.
    pub intermediate_size: usize,
    /// Number of decoder blocks.
    pub num_layers: usize,
    /// Number of query heads per block.
    pub num_heads: usize,
    /// Number of key and value heads per block; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of one attention head.
    pub head_dim: usize,
    /// Number of elements at the front of a head that the rotary embedding rotates; the others pass unchanged.
    pub rotary_dim: usize,
    /// M-RoPE sections: numbers of consecutive rotary frequencies that follow the time, row and column
    /// position, in this order, repeated.
    pub mrope_section: Vec<usize>,
    /// Base (theta) of the rotary position embedding's frequencies.
    pub rope_theta: f64,
    /// Whether queries, keys and values have a bias.
    pub attention_bias: bool,
    /// Number of token ids: rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Epsilon that every norm of the decoder adds to the mean square.
    pub rms_norm_eps: f64,
    /// Standard deviation of the normal distribution of random initial weights.
    pub initializer_range: f64,
}

/// Sizes of the vision tower and of its merger, which projects 2 x 2 patches to one feature for the language
/// model.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Width of the tower's residual stream: elements per patch.
    pub hidden_size: usize,
    /// Inner width of the blocks' MLPs, and width of the features: `out_hidden_size` in the file.
    pub out_hidden_size: usize,
    /// Inner width of the merger's MLP: `intermediate_size` in the file.
    pub merger_inner: usize,
    /// Number of transformer blocks of the tower.
    pub num_layers: usize,
    /// Number of attention heads per block.
    pub num_heads: usize,
    /// Elements of one attention head.
    pub head_dim: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Number of video frames that the patch embedding takes; a still image is repeated for each.
    pub frames: usize,
    /// Number of learned position embeddings along each side of their square grid.
    pub grid_side: usize,
    /// Epsilon that the RMSNorms of the tower add to the mean square.
    pub rms_norm_eps: f64,
}

/// Side, in patches, of the square of patches that becomes one feature.
pub const MERGE: usize = 2;

impl Glm41vConfig {
    /// Reads `config.json` of the model directory `dir`.
    ///
    /// # Errors
    /// [`ConfigError`] if the file is missing or invalid, or describes a model that is not supported.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        Self::read(ConfigFile::load(dir)?.fields())
    }

    /// Parses the content of a `config.json`; `path` is named in errors.
    ///
    /// # Errors
    /// As [`Glm41vConfig::load`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        Self::read(ConfigFile::parse(bytes, path)?.fields())
    }

    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        const TIED: &str = "tie_word_embeddings";
        let model_type: String = fields.or("model_type", String::new())?;
        if model_type != "glm4v" {
            return Err(ConfigError::UnsupportedModel { found: model_type });
        }
        // The flat layout has the fields of the language model beside `vision_config`.
        let text = fields.section("text_config")?.unwrap_or(fields);
        if fields.or(TIED, false)? || text.or(TIED, false)? {
            return Err(unsupported(TIED, "true".to_owned(), "false"));
        }
        let eos_ids = match fields.eos_ids()? {
            None => text.eos_ids()?,
            own => own,
        };
        let config = Self {
            language: LanguageConfig::read(text)?,
            vision: VisionConfig::read(fields)?,
            eos_ids: eos_ids.unwrap_or_default(),
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (language, vision) = (&self.language, &self.vision);
        divisible(
            "num_attention_heads",
            language.num_heads,
            language.num_kv_heads,
        )?;
        at_most("hidden_size / num_attention_heads", language.head_dim, 128)?;
        divisible("partial_rotary_factor * head size", language.rotary_dim, 2)?;
        at_most(
            "partial_rotary_factor * head size",
            language.rotary_dim,
            language.head_dim,
        )?;
        same(
            "the sum of mrope_section",
            language.mrope_section.iter().sum(),
            language.rotary_dim / 2,
        )?;
        same(
            "vision_config.out_hidden_size",
            vision.out_hidden_size,
            language.hidden_size,
        )?;
        // Rows and columns share the pairs of a head.
        divisible("vision_config.hidden_size / num_heads", vision.head_dim, 4)?;
        at_most(
            "vision_config.hidden_size / num_heads",
            vision.head_dim,
            128,
        )?;
        Ok(())
    }
}

fn same(field: &'static str, found: usize, expected: usize) -> Result<(), ConfigError> {
    if found == expected {
        return Ok(());
    }
    Err(ConfigError::Inconsistent {
        field,
        found,
        reason: format!("it must be {expected}"),
    })
}

impl LanguageConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        fields.expect::<String>("hidden_act", "silu")?;
        fields.no_dropout("attention_dropout")?;
        // Angles: `rope_scaling` beside two plain fields, or all of it in `rope_parameters`.
        let rope = match fields.section("rope_parameters")? {
            None => fields.section("rope_scaling")?,
            rope => rope,
        };
        let of_rope = |field: &str| rope.map_or(Ok(None), |rope| rope.optional::<f64>(field));
        let text = |field: &str| rope.map_or(Ok(None), |rope| rope.optional::<String>(field));
        let kind = match text("rope_type")? {
            None => text("type")?,
            kind => kind,
        };
        expect("rope_parameters.rope_type", kind.as_deref(), "default")?;
        // Defaults are those of the class, used where a file has no value.
        let number = |field: &'static str, default: f64| -> Result<f64, ConfigError> {
            match of_rope(field)? {
                Some(own) => positive(field, own),
                None => fields.positive_or(field, default),
            }
        };
        let rope_theta = number("rope_theta", 1e4)?;
        let factor = number("partial_rotary_factor", 0.5)?;
        let sections = rope.map_or(Ok(None), |rope| rope.optional("mrope_section"))?;
        let mrope_section: Vec<usize> = sections.unwrap_or_else(|| vec![8, 12, 12]);
        for section in &mrope_section {
            size("mrope_section", *section)?;
        }
        let hidden_size = fields.size("hidden_size")?;
        let num_heads = fields.size("num_attention_heads")?;
        let head_dim = divisible("hidden_size", hidden_size, num_heads)?;
        Ok(Self {
            hidden_size,
            intermediate_size: fields.size("intermediate_size")?,
            num_layers: fields.size("num_hidden_layers")?,
            num_heads,
            num_kv_heads: fields.size("num_key_value_heads")?,
            head_dim,
            rotary_dim: (head_dim as f64 * factor) as usize,
            mrope_section,
            rope_theta,
            attention_bias: fields.or("attention_bias", true)?,
            vocab_size: fields.size("vocab_size")?,
            rms_norm_eps: fields.positive("rms_norm_eps")?,
            initializer_range: fields.positive_or("initializer_range", 0.02)?,
        })
    }
}

impl VisionConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        const WIDTH: &str = "vision_config.hidden_size";
        const FRAMES: &str = "vision_config.temporal_patch_size";
        const SIDE: &str = "vision_config.image_size";
        fields.expect::<String>("vision_config.hidden_act", "silu")?;
        fields.expect::<usize>("vision_config.in_channels", "3")?;
        fields.expect::<usize>("vision_config.spatial_merge_size", "2")?;
        fields.no_dropout("vision_config.attention_dropout")?;
        fields.no_dropout("vision_config.hidden_dropout_prob")?;
        fields.expect::<bool>("vision_config.attention_bias", "false")?;
        let (width, heads) = (fields.size(WIDTH)?, fields.size("vision_config.num_heads")?);
        let patch_size = fields.size("vision_config.patch_size")?;
        let grid_side = divisible(SIDE, fields.required(SIDE)?, patch_size)?;
        Ok(Self {
            hidden_size: width,
            out_hidden_size: fields.size("vision_config.out_hidden_size")?,
            merger_inner: fields.size("vision_config.intermediate_size")?,
            num_layers: fields.size("vision_config.depth")?,
            num_heads: heads,
            head_dim: divisible(WIDTH, width, heads)?,
            patch_size,
            frames: at_most(FRAMES, fields.size_or(FRAMES, 2)?, 16)?,
            grid_side: size(SIDE, grid_side)?,
            rms_norm_eps: fields.positive_or("vision_config.rms_norm_eps", 1e-5)?,
        })
    }
}
