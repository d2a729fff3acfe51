//! `config.json` of CogVLM, CogAgent and CogVLM2, checked once, so that model code does not have to.
//!
//! The files have no `model_type`. The class in `architectures` and the fields identify the family.

use crate::config::{
    ConfigError, Fields, LanguageConfig, LanguageKeys, Rope, at_most, divisible, grid,
    reads_config_json, same, size, unsupported,
};
use crate::eva::EvaConfig;

/// Base of the rotary frequencies of CogVLM and CogAgent, a constant of the published code.
const THETA: f64 = 10_000.0;
/// Base of the rotary frequencies of CogVLM2.
const THETA_2: f64 = 500_000.0;

/// Which published family a checkpoint belongs to: CogVLM, CogAgent or CogVLM2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edition {
    /// CogVLM.
    CogVlm,
    /// CogAgent: a second tower of higher resolution, read by cross-attention.
    CogAgent,
    /// CogVLM2: grouped keys and values, 2 x 2 patches per feature.
    CogVlm2,
}

/// A prompt template of the CogVLM family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TemplateVersion {
    /// The question alone, without text around it.
    Base,
    /// A conversation, with its earlier rounds.
    Chat,
    /// A question that asks for a short answer.
    Vqa,
    /// CogAgent's earlier form of a conversation.
    ChatOld,
}

/// Configuration of a CogVLM, CogAgent or CogVLM2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct CogConfig {
    /// Whether the checkpoint is a CogVLM, a CogAgent or a CogVLM2.
    pub edition: Edition,
    /// Sizes of the language decoder.
    pub language: LanguageConfig,
    /// Id of the token before every sample.
    pub bos: i32,
    /// Id of the token after every answer.
    pub eos: i32,
    /// Id of the padding token, also the placeholder that image features replace; its embedding gets no
    /// gradient.
    pub pad: i32,
    /// Sizes of the EVA vision tower.
    pub vision: EvaConfig,
    /// Sizes of CogAgent's second vision tower; absent in the other families.
    pub cross: Option<CrossConfig>,
    /// Prompt template that is used unless the run chooses another.
    pub template: TemplateVersion,
}

/// Sizes of CogAgent's second vision tower (EVA2-CLIP-L) and of the cross-attention that reads it.
#[derive(Clone, Debug, PartialEq)]
pub struct CrossConfig {
    /// Side of the tower's square image in pixels.
    pub image_size: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Width of the tower's residual stream, and of the cross-attention.
    pub width: usize,
    /// Elements of one attention head of the tower.
    pub head_dim: usize,
    /// Number of the tower's blocks in the checkpoint; the last one is never computed.
    pub layers: usize,
    /// Inner width of the gated MLP in each block of the tower.
    pub inner: usize,
    /// Rows of the tower's output head in the checkpoint; the head is never computed.
    pub embed_dim: usize,
    /// Side, in patches, of the square grid to which a patch's row and column are scaled for the rotary
    /// embedding.
    pub rope_side: usize,
}

impl CrossConfig {
    /// Number of patches along one side of the square image.
    #[must_use]
    pub fn grid(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// Number of patches of the high-resolution image, without the class token. The text cross-attends to as many
    /// features.
    #[must_use]
    pub fn patches(&self) -> usize {
        self.grid() * self.grid()
    }
}

reads_config_json!(CogConfig);

impl CogConfig {
    fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        let Some(edition) = Edition::read(fields)? else {
            return Err(ConfigError::UnsupportedModel {
                found: architecture(fields)?,
            });
        };
        let text = fields.language()?;
        fields.untied(text)?;
        let template: Option<String> = fields.optional("template_version")?;
        let template = template_of(template.as_deref())?;
        let language = edition.language(text)?;
        let token = |field: &'static str| -> Result<i32, ConfigError> {
            let id: i32 = match text.optional(field)? {
                Some(id) => id,
                None => fields.required(field)?,
            };
            match usize::try_from(id) {
                Ok(inside) if inside < language.vocab_size => Ok(id),
                _ => Err(unsupported(
                    field,
                    id.to_string(),
                    "a token of the vocabulary",
                )),
            }
        };
        let cross = match edition {
            Edition::CogAgent => Some(CrossConfig::read(fields, language.num_heads)?),
            Edition::CogVlm | Edition::CogVlm2 => None,
        };
        let vision = EvaConfig::read(fields)?;
        if edition == Edition::CogVlm2 {
            divisible("vision_config.image_size / patch_size", vision.grid(), 2)?;
        }
        Ok(Self {
            edition,
            bos: token("bos_token_id")?,
            eos: token("eos_token_id")?,
            pad: token("pad_token_id")?,
            language,
            vision,
            cross,
            template,
        })
    }

    /// Number of features that an image has in the prompt, without the learned rows around them.
    #[must_use]
    pub fn features(&self) -> usize {
        match self.edition {
            Edition::CogVlm2 => self.vision.patches() / 4,
            Edition::CogVlm | Edition::CogAgent => self.vision.patches(),
        }
    }

    /// Number of slices per image: one for each vision tower.
    #[must_use]
    pub fn slices_per_image(&self) -> usize {
        1 + usize::from(self.cross.is_some())
    }
}

/// The first class of `architectures`, or nothing.
fn architecture(fields: Fields<'_>) -> Result<String, ConfigError> {
    let all: Vec<String> = fields.nullable("architectures")?.unwrap_or_default();
    Ok(all.into_iter().next().unwrap_or_default())
}

impl Edition {
    /// The family that a `config.json` describes; `None` for any other.
    ///
    /// # Errors
    /// When a field has another type.
    pub(crate) fn read(fields: Fields<'_>) -> Result<Option<Self>, ConfigError> {
        let grouped: Option<usize> = fields.language()?.optional("num_multi_query_heads")?;
        Ok(match (&*architecture(fields)?, grouped) {
            ("CogVLMForCausalLM", None) => Some(Self::CogVlm),
            ("CogVLMForCausalLM", Some(_)) => Some(Self::CogVlm2),
            ("CogAgentForCausalLM", _) => Some(Self::CogAgent),
            _ => None,
        })
    }

    /// The fields of the language model.
    fn language(self, fields: Fields<'_>) -> Result<LanguageConfig, ConfigError> {
        let rope_theta = match self {
            Self::CogVlm2 => THETA_2,
            Self::CogVlm | Self::CogAgent => THETA,
        };
        let rope = Rope::read(fields)?;
        rope.constant("rope_theta", rope_theta)?;
        rope.constant("partial_rotary_factor", 1.0)?;
        let keys = LanguageKeys {
            num_kv_heads: |fields, heads| fields.size_or("num_multi_query_heads", heads),
            ..LanguageKeys::TRANSFORMERS
        };
        LanguageConfig::read(fields, &keys, rope_theta)
    }
}

impl CrossConfig {
    /// Published files leave most fields out; the defaults are constants of the published code.
    fn read(fields: Fields<'_>, heads: usize) -> Result<Self, ConfigError> {
        const SIZE: &str = "cross_image_size";
        const HEAD: &str = "cross_vision_config.head_width";
        const PATCH: &str = "cross_vision_config.patch_size";
        let width = fields.size_or("cross_vision_config.width", 1024)?;
        for field in ["cross_hidden_size", "cross_compute_hidden_size"] {
            // The code splits heads of the one width after a projection to the other.
            same(field, fields.or(field, width)?, width)?;
        }
        divisible("cross_compute_hidden_size", width, heads)?;
        let head_dim = at_most(HEAD, fields.size_or(HEAD, 64)?, 128)?;
        // Half of a head turns by the row, half by the column, in pairs.
        divisible(HEAD, head_dim, 4)?;
        divisible("cross_vision_config.width", width, head_dim)?;
        let ratio = fields.positive_or("cross_vision_config.mlp_ratio", 2.6667)?;
        let patch_size = fields.size_or(PATCH, 14)?;
        let image_size = fields.size_or(SIZE, 1120)?;
        grid(SIZE, image_size, patch_size)?;
        Ok(Self {
            image_size,
            patch_size,
            width,
            head_dim,
            layers: fields.size_or("cross_vision_config.layers", 24)?,
            inner: size(
                "cross_vision_config.mlp_ratio * width",
                (width as f64 * ratio) as usize,
            )?,
            embed_dim: fields.size_or("cross_vision_config.embed_dim", 768)?,
            rope_side: fields.size_or("cross_vision_config.pt_hw_seq_len", 16)?,
        })
    }
}

fn template_of(found: Option<&str>) -> Result<TemplateVersion, ConfigError> {
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
    use std::path::Path;

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
    fn published_configurations_have_their_published_sizes() {
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
        assert_eq!((agent.features(), agent.slices_per_image()), (256, 2));
        let cross = agent.cross.unwrap();
        assert_eq!(
            (cross.patches(), cross.inner, cross.layers),
            (6400, 2730, 24)
        );
    }

    #[test]
    fn unsupported_model_classes_are_named() {
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
