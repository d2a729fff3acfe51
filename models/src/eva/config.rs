//! Sizes of the EVA tower, from `vision_config` of `config.json`.

use crate::config::{ConfigError, at_most, divisible, expect, no_dropout, positive, size};
use serde::Deserialize;

/// Sizes of the EVA tower.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaConfig {
    /// Width of the residual stream.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Width of the MLP.
    pub inner: usize,
    /// Blocks.
    pub layers: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Side of the square image in pixels.
    pub image_size: usize,
    /// Epsilon of every norm of the blocks.
    pub eps: f64,
}

impl EvaConfig {
    /// Patches per side.
    #[must_use]
    pub fn grid(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// Patches per image.
    #[must_use]
    pub fn patches(&self) -> usize {
        self.grid() * self.grid()
    }
}

/// `vision_config` as in the file.
#[derive(Deserialize)]
pub(crate) struct RawEva {
    hidden_size: usize,
    num_heads: usize,
    num_hidden_layers: usize,
    intermediate_size: usize,
    patch_size: usize,
    image_size: usize,
    num_positions: usize,
    layer_norm_eps: f64,
    #[serde(default = "three")]
    in_channels: usize,
    #[serde(default)]
    dropout_prob: f64,
    hidden_act: Option<String>,
}

fn three() -> usize {
    3
}

impl RawEva {
    /// # Errors
    /// [`ConfigError`] for unsupported values and for sizes that contradict each other.
    pub(crate) fn resolve(self) -> Result<EvaConfig, ConfigError> {
        const WIDTH: &str = "vision_config.hidden_size";
        expect(
            "vision_config.hidden_act",
            self.hidden_act.as_deref(),
            "gelu",
        )?;
        no_dropout("vision_config.dropout_prob", self.dropout_prob)?;
        let channels = self.in_channels.to_string();
        expect("vision_config.in_channels", Some(&channels), "3")?;
        let patch_size = size("vision_config.patch_size", self.patch_size)?;
        // The values of a patch are one row of a matrix.
        at_most("vision_config.patch_size", patch_size, 1 << 10)?;
        let image_size = size("vision_config.image_size", self.image_size)?;
        let grid = divisible("vision_config.image_size", image_size, patch_size)?;
        if grid.checked_mul(grid).and_then(|p| p.checked_add(1)) != Some(self.num_positions) {
            return Err(ConfigError::Inconsistent {
                field: "vision_config.num_positions",
                found: self.num_positions,
                reason: format!("a picture has {grid} x {grid} patches, and one position more"),
            });
        }
        let head_dim = divisible(WIDTH, self.hidden_size, self.num_heads)?;
        at_most("vision_config.hidden_size / num_heads", head_dim, 128)?;
        Ok(EvaConfig {
            width: size(WIDTH, self.hidden_size)?,
            heads: size("vision_config.num_heads", self.num_heads)?,
            head_dim,
            inner: size("vision_config.intermediate_size", self.intermediate_size)?,
            layers: size("vision_config.num_hidden_layers", self.num_hidden_layers)?,
            patch_size,
            image_size,
            eps: positive("vision_config.layer_norm_eps", self.layer_norm_eps)?,
        })
    }
}
