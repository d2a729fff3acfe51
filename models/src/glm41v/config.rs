//! `config.json` of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR, nested or flat, checked once, so that model code does not
//! have to.

use crate::config::{
    ConfigError, Fields, HeadDim, LanguageConfig, LanguageKeys, Rope, at_most, divisible, grid,
    reads_config_json, same, size, unsupported,
};

/// Configuration of a model of the GLM-4.1V line.
#[derive(Clone, Debug, PartialEq)]
pub struct Glm41vConfig {
    /// Whether `config.json` describes the network of GLM-4.1V, which GLM-4.6V-Flash shares, or that of GLM-OCR.
    pub network: Network,
    /// Sizes of the language decoder.
    pub language: LanguageConfig,
    /// Number of elements at the front of a head that the rotary embedding rotates; the others pass unchanged.
    pub rotary_dim: usize,
    /// M-RoPE sections: numbers of consecutive rotary frequencies that follow the time, row and column
    /// position, in this order, repeated.
    pub mrope_section: Vec<usize>,
    /// Sizes of the vision tower and its merger.
    pub vision: VisionConfig,
    /// Ids of the tokens that end an answer.
    pub eos_ids: Vec<i32>,
    /// Id of the image token, if the file states it.
    pub image_token_id: Option<i32>,
}

/// Network of the GLM-4.1V line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// GLM-4.1V and GLM-4.6V-Flash (`glm4v`, `glm46v`).
    Glm41v,
    /// GLM-OCR (`glm_ocr`): norms of query and key heads in the tower, biases there, and no learned positions.
    GlmOcr,
}

impl Network {
    fn of(model_type: String) -> Result<Self, ConfigError> {
        match model_type.as_str() {
            "glm4v" | "glm46v" => Ok(Self::Glm41v),
            "glm_ocr" => Ok(Self::GlmOcr),
            _ => Err(ConfigError::UnsupportedModel { found: model_type }),
        }
    }

    /// Names of the fields of the language model.
    fn keys(self) -> LanguageKeys {
        LanguageKeys {
            default_eps: Some(1e-5),
            head_dim: match self {
                Self::Glm41v => HeadDim::Implied,
                Self::GlmOcr => HeadDim::Own("head_dim", None),
            },
            // A part of a head rotates.
            head_multiple: 1,
            ..LanguageKeys::TRANSFORMERS
        }
    }
}

/// Sizes of the vision tower and of its merger, which projects 2 x 2 patches to one feature for the language
/// model.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Width of the tower's residual stream: elements per patch.
    pub hidden_size: usize,
    /// Width of the features: `out_hidden_size` in the file.
    pub out_hidden_size: usize,
    /// Inner width of the blocks' MLPs: `out_hidden_size` in the file of GLM-4.1V, `intermediate_size` in GLM-OCR's.
    pub inner: usize,
    /// Inner width of the merger's MLP: `intermediate_size` in the file of GLM-4.1V, three times `out_hidden_size`
    /// in GLM-OCR.
    pub merger_inner: usize,
    /// Whether all linear layers of the blocks have a bias.
    pub bias: bool,
    /// Whether query and key heads have RMSNorms of their own.
    pub head_norms: bool,
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
    /// Number of learned position embeddings along each side of their square grid. `None`: patches have no learned
    /// positions, and no norm after their embedding.
    pub grid_side: Option<usize>,
    /// Epsilon that the RMSNorms of the tower add to the mean square.
    pub rms_norm_eps: f64,
}

/// Largest number of learned positions along each side; every patch of an image has a weight for each of them.
const MAX_GRID_SIDE: usize = 64;
/// Side, in patches, of the square of patches that becomes one feature.
pub const MERGE: usize = 2;
/// Color channels of a pixel.
const CHANNELS: usize = 3;

reads_config_json!(Glm41vConfig);

impl Glm41vConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let network = Network::of(fields.nullable("model_type")?.unwrap_or_default())?;
        let text = fields.language()?;
        fields.untied(text)?;
        let rope = Rope::read(text)?;
        // Defaults are those of transformers, used where a file has no value.
        let language =
            LanguageConfig::read(text, &network.keys(), rope.number("rope_theta", 1e4)?)?;
        let factor = rope.number("partial_rotary_factor", 1.0)?;
        let sections = rope.own("mrope_section")?;
        let config = Self {
            network,
            rotary_dim: (language.head_dim as f64 * factor) as usize,
            mrope_section: sections.unwrap_or_else(|| vec![8, 12, 12]),
            language,
            vision: VisionConfig::read(fields, network)?,
            eos_ids: fields.eos_ids_of_both(text)?,
            image_token_id: fields.optional("image_token_id")?,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (language, vision) = (&self.language, &self.vision);
        for section in &self.mrope_section {
            size("mrope_section", *section)?;
        }
        divisible("partial_rotary_factor * head size", self.rotary_dim, 2)?;
        at_most(
            "partial_rotary_factor * head size",
            self.rotary_dim,
            language.head_dim,
        )?;
        same(
            "the sum of mrope_section",
            self.mrope_section.iter().sum(),
            self.rotary_dim / 2,
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

/// Fails if the tower's rotary positions differ from the published ones, whose type transformers 5 calls axial.
fn check_rope(fields: Fields<'_>) -> Result<(), ConfigError> {
    const TYPE: &str = "vision_config.rope_parameters.rope_type";
    const THETA: &str = "vision_config.rope_parameters.rope_theta";
    let kind: Option<String> = fields.optional(TYPE)?;
    match kind.as_deref() {
        None | Some("default" | "axial") => {}
        Some(other) => return Err(unsupported(TYPE, other.to_owned(), "axial")),
    }
    match fields.positive_or(THETA, 1e4)? {
        1e4 => Ok(()),
        other => Err(unsupported(THETA, other.to_string(), "10000")),
    }
}

impl VisionConfig {
    fn read(fields: Fields<'_>, network: Network) -> Result<Self, ConfigError> {
        const WIDTH: &str = "vision_config.hidden_size";
        const FRAMES: &str = "vision_config.temporal_patch_size";
        fields.expect::<String>("vision_config.hidden_act", "silu")?;
        fields.expect::<usize>("vision_config.in_channels", "3")?;
        fields.expect::<usize>("vision_config.spatial_merge_size", "2")?;
        fields.no_dropout("vision_config.attention_dropout")?;
        fields.no_dropout("vision_config.hidden_dropout_prob")?;
        let (width, heads) = (fields.size(WIDTH)?, fields.size("vision_config.num_heads")?);
        let patch_size = fields.size_or("vision_config.patch_size", 14)?;
        check_rope(fields)?;
        let out_hidden_size = fields.size("vision_config.out_hidden_size")?;
        let inner = fields.size("vision_config.intermediate_size")?;
        let is_ocr = network == Network::GlmOcr;
        let bias = fields.flag("vision_config.attention_bias", is_ocr)?;
        if bias && !is_ocr {
            return Err(unsupported(
                "vision_config.attention_bias",
                "true".to_owned(),
                "false",
            ));
        }
        let [inner, merger_inner] = match is_ocr {
            true => [inner, out_hidden_size * CHANNELS],
            false => [out_hidden_size, inner],
        };
        Ok(Self {
            hidden_size: width,
            out_hidden_size,
            inner,
            merger_inner,
            bias,
            head_norms: is_ocr,
            num_layers: fields.size("vision_config.depth")?,
            num_heads: heads,
            head_dim: divisible(WIDTH, width, heads)?,
            patch_size,
            frames: at_most(FRAMES, fields.size_or(FRAMES, 2)?, 16)?,
            grid_side: match is_ocr {
                true => None,
                false => Some(learned_grid(fields, patch_size)?),
            },
            rms_norm_eps: fields.positive_or("vision_config.rms_norm_eps", 1e-5)?,
        })
    }
}

/// Number of learned positions along each side.
fn learned_grid(fields: Fields<'_>, patch_size: usize) -> Result<usize, ConfigError> {
    const SIDE: &str = "vision_config.image_size";
    let grid_side = grid(SIDE, fields.size(SIDE)?, patch_size)?;
    at_most(
        "vision_config.image_size / patch_size",
        grid_side,
        MAX_GRID_SIDE,
    )
}
