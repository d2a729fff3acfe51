//! Reader of `config.json` of CogVLM, CogAgent and CogVLM2. It checks everything once, so the model code need not.
//!
//! The files carry no `model_type`: the class in `architectures` and the fields present tell the families apart.

use crate::config::{self, ConfigError, at_most, divisible, expect, positive, size, unsupported};
use crate::eva::{EvaConfig, RawEva};
use serde::Deserialize;
use std::path::Path;

/// Base of the rotary frequencies of CogVLM and CogAgent, a constant in their code.
const THETA: f32 = 10_000.0;
/// Base of the rotary frequencies of CogVLM2, a constant in its code.
const THETA_2: f32 = 500_000.0;

/// Published family of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edition {
    /// CogVLM.
    CogVlm,
    /// CogAgent: a second vision tower of higher resolution, read by cross-attention.
    CogAgent,
    /// CogVLM2: grouped-query attention, and 2 x 2 patches per feature.
    CogVlm2,
}

/// Prompt template that a checkpoint was trained with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateVersion {
    /// The question alone.
    Base,
    /// A chat.
    Chat,
    /// A question with a short answer.
    Vqa,
    /// CogAgent's earlier chat template.
    ChatOld,
}

/// Configuration of the whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct CogConfig {
    /// The published family.
    pub edition: Edition,
    /// The decoder.
    pub language: LanguageConfig,
    /// The EVA tower.
    pub vision: EvaConfig,
    /// CogAgent's second tower.
    pub cross: Option<CrossConfig>,
    /// Default prompt template.
    pub template: TemplateVersion,
}

/// Sizes of the decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct LanguageConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of each expert's gated MLP, and of the projector's.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
    /// Standard deviation of random initial values.
    pub initializer_range: f64,
    /// Token id before every sample.
    pub bos: i32,
    /// Token id after every answer.
    pub eos: i32,
    /// Placeholder and padding token id; its embedding gets no gradient.
    pub pad: i32,
}

/// Sizes of CogAgent's second tower (EVA2-CLIP-L) and of the cross-attention that reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossConfig {
    /// Side of the square image in pixels.
    pub image_size: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Width of the tower and of the cross-attention.
    pub width: usize,
    /// Elements per head of the tower.
    pub head_dim: usize,
    /// Blocks in the checkpoint. The last one is never computed.
    pub layers: usize,
    /// Width of the gated MLP in the tower's blocks.
    pub inner: usize,
    /// Rows of the tower's head, which is in the checkpoint but never computed.
    pub embed_dim: usize,
    /// Side of the grid that rotary coordinates are scaled to.
    pub rope_side: usize,
}

impl CrossConfig {
    /// Patches per side.
    #[must_use]
    pub fn grid(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// Patches of an image. Each is a feature that tokens read.
    #[must_use]
    pub fn patches(&self) -> usize {
        self.grid() * self.grid()
    }
}

impl CogConfig {
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
    /// As [`CogConfig::load`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let invalid = |source| ConfigError::Json {
            path: path.to_owned(),
            source,
        };
        let edition = Edition::parse(bytes).map_err(invalid)?;
        let Some(edition) = edition else {
            let head: Head = serde_json::from_slice(bytes).map_err(invalid)?;
            return Err(ConfigError::UnsupportedModel {
                found: head.architectures.into_iter().next().unwrap_or_default(),
            });
        };
        let raw: Raw = serde_json::from_slice(bytes).map_err(invalid)?;
        raw.resolve(edition)
    }

    /// Number of features of an image in the prompt, without the two learned rows around them.
    #[must_use]
    pub fn features(&self) -> usize {
        match self.edition {
            Edition::CogVlm2 => self.vision.patches() / 4,
            Edition::CogVlm | Edition::CogAgent => self.vision.patches(),
        }
    }

    /// Number of slices of an image: one per tower.
    #[must_use]
    pub fn slices_per_picture(&self) -> usize {
        1 + usize::from(self.cross.is_some())
    }
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    architectures: Vec<String>,
    num_multi_query_heads: Option<usize>,
}

impl Edition {
    /// The family of a `config.json`; `None` for other models.
    ///
    /// # Errors
    /// When it is not JSON.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, serde_json::Error> {
        let head: Head = serde_json::from_slice(bytes)?;
        let class = head.architectures.first().map_or("", String::as_str);
        Ok(match (class, head.num_multi_query_heads) {
            ("CogVLMForCausalLM", None) => Some(Self::CogVlm),
            ("CogVLMForCausalLM", Some(_)) => Some(Self::CogVlm2),
            ("CogAgentForCausalLM", _) => Some(Self::CogAgent),
            _ => None,
        })
    }
}

#[derive(Deserialize)]
struct Raw {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_multi_query_heads: Option<usize>,
    vocab_size: usize,
    rms_norm_eps: f64,
    initializer_range: Option<f64>,
    hidden_act: Option<String>,
    #[serde(default)]
    tie_word_embeddings: bool,
    bos_token_id: i32,
    eos_token_id: i32,
    pad_token_id: i32,
    template_version: Option<String>,
    vision_config: RawEva,
    cross_image_size: Option<usize>,
    cross_hidden_size: Option<usize>,
    cross_compute_hidden_size: Option<usize>,
    cross_vision_config: Option<RawCross>,
}

/// Sizes of the second tower in the file. Published files omit them; they are constants in the published code.
#[derive(Deserialize)]
#[serde(default)]
struct RawCross {
    layers: usize,
    width: usize,
    head_width: usize,
    mlp_ratio: f64,
    patch_size: usize,
    embed_dim: usize,
    pt_hw_seq_len: usize,
}

impl Default for RawCross {
    fn default() -> Self {
        Self {
            layers: 24,
            width: 1024,
            head_width: 64,
            mlp_ratio: 2.6667,
            patch_size: 14,
            embed_dim: 768,
            pt_hw_seq_len: 16,
        }
    }
}

impl Raw {
    fn resolve(self, edition: Edition) -> Result<CogConfig, ConfigError> {
        expect("hidden_act", self.hidden_act.as_deref(), "silu")?;
        if self.tie_word_embeddings {
            return Err(unsupported(
                "tie_word_embeddings",
                "true".to_owned(),
                "false",
            ));
        }
        let template = template(self.template_version.as_deref())?;
        let language = self.language(edition)?;
        let cross = match edition {
            Edition::CogAgent => Some(self.cross(language.num_heads)?),
            Edition::CogVlm | Edition::CogVlm2 => None,
        };
        let vision = self.vision_config.resolve()?;
        if edition == Edition::CogVlm2 {
            divisible("vision_config.image_size / patch_size", vision.grid(), 2)?;
        }
        Ok(CogConfig {
            edition,
            language,
            vision,
            cross,
            template,
        })
    }

    fn language(&self, edition: Edition) -> Result<LanguageConfig, ConfigError> {
        let heads = size("num_attention_heads", self.num_attention_heads)?;
        let kv_heads = self.num_multi_query_heads.unwrap_or(heads);
        divisible("num_attention_heads", heads, kv_heads)?;
        let head_dim = divisible("hidden_size", self.hidden_size, heads)?;
        // Rotary embedding pairs the two halves of a head.
        divisible("hidden_size / num_attention_heads", head_dim, 2)?;
        at_most("hidden_size / num_attention_heads", head_dim, 128)?;
        let vocab_size = size("vocab_size", self.vocab_size)?;
        let token = |field, id: i32| match usize::try_from(id) {
            Ok(inside) if inside < vocab_size => Ok(id),
            _ => Err(unsupported(
                field,
                id.to_string(),
                "a token of the vocabulary",
            )),
        };
        Ok(LanguageConfig {
            hidden_size: size("hidden_size", self.hidden_size)?,
            intermediate_size: size("intermediate_size", self.intermediate_size)?,
            num_layers: size("num_hidden_layers", self.num_hidden_layers)?,
            num_heads: heads,
            num_kv_heads: kv_heads,
            head_dim,
            vocab_size,
            rms_norm_eps: positive("rms_norm_eps", self.rms_norm_eps)?,
            rope_theta: if edition == Edition::CogVlm2 {
                THETA_2
            } else {
                THETA
            },
            initializer_range: positive(
                "initializer_range",
                self.initializer_range.unwrap_or(0.02),
            )?,
            bos: token("bos_token_id", self.bos_token_id)?,
            eos: token("eos_token_id", self.eos_token_id)?,
            pad: token("pad_token_id", self.pad_token_id)?,
        })
    }

    fn cross(&self, heads: usize) -> Result<CrossConfig, ConfigError> {
        const SIZE: &str = "cross_image_size";
        let default = RawCross::default();
        let raw = self.cross_vision_config.as_ref().unwrap_or(&default);
        let width = size("cross_vision_config.width", raw.width)?;
        for (field, found) in [
            ("cross_hidden_size", self.cross_hidden_size),
            ("cross_compute_hidden_size", self.cross_compute_hidden_size),
        ] {
            // The code splits a projection of one width into heads of the other width.
            let found = found.unwrap_or(width);
            if found != width {
                return Err(ConfigError::Inconsistent {
                    field,
                    found,
                    reason: format!("the second tower has width {width}"),
                });
            }
        }
        divisible("cross_compute_hidden_size", width, heads)?;
        let head_dim = size("cross_vision_config.head_width", raw.head_width)?;
        at_most("cross_vision_config.head_width", head_dim, 128)?;
        // Half of a head rotates with the row, half with the column, in pairs.
        divisible("cross_vision_config.head_width", head_dim, 4)?;
        divisible("cross_vision_config.width", width, head_dim)?;
        let ratio = positive("cross_vision_config.mlp_ratio", raw.mlp_ratio)?;
        let patch_size = size("cross_vision_config.patch_size", raw.patch_size)?;
        at_most("cross_vision_config.patch_size", patch_size, 1 << 10)?;
        let image_size = size(SIZE, self.cross_image_size.unwrap_or(1120))?;
        let grid = divisible(SIZE, image_size, patch_size)?;
        at_most("cross_image_size / patch_size", grid, 1 << 12)?;
        Ok(CrossConfig {
            image_size,
            patch_size,
            width,
            head_dim,
            layers: size("cross_vision_config.layers", raw.layers)?,
            inner: size(
                "cross_vision_config.mlp_ratio * width",
                (width as f64 * ratio) as usize,
            )?,
            embed_dim: size("cross_vision_config.embed_dim", raw.embed_dim)?,
            rope_side: size("cross_vision_config.pt_hw_seq_len", raw.pt_hw_seq_len)?,
        })
    }
}

fn template(found: Option<&str>) -> Result<TemplateVersion, ConfigError> {
    match found {
        Some("base") => Ok(TemplateVersion::Base),
        None | Some("chat") => Ok(TemplateVersion::Chat),
        Some("vqa") => Ok(TemplateVersion::Vqa),
        Some("chat_old") => Ok(TemplateVersion::ChatOld),
        Some(other) => Err(unsupported(
            "template_version",
            other.to_owned(),
            "base, chat, vqa or chat_old",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cogvlm::tests::real_config;
    use serde_json::{Value, json};

    fn parse(value: &Value) -> Result<CogConfig, ConfigError> {
        CogConfig::parse(value.to_string().as_bytes(), Path::new("config.json"))
    }

    fn with(edition: Edition, pointer: &str, value: Value) -> Result<CogConfig, ConfigError> {
        let mut config = real_config(edition);
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[key] = value;
        parse(&config)
    }

    #[test]
    fn published_sizes() {
        let vlm = parse(&real_config(Edition::CogVlm)).unwrap();
        assert_eq!((vlm.edition, vlm.features()), (Edition::CogVlm, 1225));
        assert_eq!((vlm.vision.head_dim, vlm.language.head_dim), (112, 128));
        let two = parse(&real_config(Edition::CogVlm2)).unwrap();
        assert_eq!((two.edition, two.features()), (Edition::CogVlm2, 2304));
        assert_eq!(
            (two.language.num_kv_heads, two.language.rope_theta),
            (8, 500_000.0)
        );
        let agent = parse(&real_config(Edition::CogAgent)).unwrap();
        assert_eq!((agent.features(), agent.slices_per_picture()), (256, 2));
        let cross = agent.cross.unwrap();
        assert_eq!(
            (cross.patches(), cross.inner, cross.layers),
            (6400, 2730, 24)
        );
    }

    #[test]
    fn other_classes_are_named() {
        let error = with(
            Edition::CogVlm,
            "/architectures",
            json!(["CogVLMVideoForCausalLM"]),
        );
        let error = error.unwrap_err();
        assert!(
            matches!(error, ConfigError::UnsupportedModel { found } if found.contains("Video"))
        );
    }

    #[test]
    fn unsupported_configurations_are_refused() {
        for (pointer, value) in [
            ("/hidden_act", json!("gelu")),
            ("/tie_word_embeddings", json!(true)),
            ("/template_version", json!("other")),
            ("/bos_token_id", json!(-1)),
            ("/pad_token_id", json!(32000)),
            ("/rms_norm_eps", json!(0.0)),
            ("/vision_config/hidden_act", json!("gelu_pytorch_tanh")),
            ("/vision_config/dropout_prob", json!(0.1)),
            ("/vision_config/in_channels", json!(4)),
        ] {
            let result = with(Edition::CogVlm, pointer, value);
            let refused = matches!(result, Err(ConfigError::Unsupported { .. }));
            assert!(refused, "{pointer}: {result:?}");
        }
    }

    #[test]
    fn impossible_sizes_are_errors_not_panics() {
        for (edition, pointer, value) in [
            (Edition::CogVlm, "/num_attention_heads", json!(0)),
            (Edition::CogVlm, "/num_attention_heads", json!(3)),
            (Edition::CogVlm, "/hidden_size", json!(32 * 3)),
            (Edition::CogVlm, "/hidden_size", json!(32 * 256)),
            (Edition::CogVlm2, "/num_multi_query_heads", json!(5)),
            (Edition::CogVlm2, "/num_multi_query_heads", json!(0)),
            (Edition::CogVlm, "/vocab_size", json!(u64::MAX)),
            (Edition::CogVlm, "/vision_config/patch_size", json!(0)),
            (Edition::CogVlm, "/vision_config/num_positions", json!(1225)),
            (Edition::CogVlm, "/vision_config/num_heads", json!(0)),
            (Edition::CogAgent, "/cross_compute_hidden_size", json!(512)),
            (Edition::CogAgent, "/cross_image_size", json!(1121)),
        ] {
            let result = with(edition, pointer, value);
            let impossible = matches!(
                result,
                Err(ConfigError::Inconsistent { .. } | ConfigError::Unsupported { .. })
            );
            assert!(impossible, "{pointer}: {result:?}");
        }
        let mut odd = real_config(Edition::CogVlm2);
        odd["vision_config"]["image_size"] = json!(14 * 95);
        odd["vision_config"]["num_positions"] = json!(95 * 95 + 1);
        assert!(matches!(parse(&odd), Err(ConfigError::Inconsistent { .. })));
    }
}
