//! Sizes of the tower: `vision_config` of `config.json`.

use crate::config::{ConfigError, Fields, at_most, divisible, grid};

/// Sizes of the EVA vision tower.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaConfig {
    /// Width of the tower's residual stream: elements per patch.
    pub width: usize,
    /// Number of attention heads per block.
    pub heads: usize,
    /// Elements of one attention head.
    pub head_dim: usize,
    /// Inner width of the MLP in each block.
    pub inner: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Side of the square image in pixels.
    pub image_size: usize,
    /// Epsilon that every norm of the blocks adds to the variance.
    pub eps: f64,
}

impl EvaConfig {
    /// Number of patches along one side of the square image.
    #[must_use]
    pub fn grid(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// Number of patches of one image.
    #[must_use]
    pub fn patches(&self) -> usize {
        self.grid() * self.grid()
    }

    /// Reads `vision_config` of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] for unsupported values and for sizes that contradict each other.
    pub(crate) fn read(fields: Fields<'_>) -> Result<Self, ConfigError> {
        const WIDTH: &str = "vision_config.hidden_size";
        fields.expect::<String>("vision_config.hidden_act", "gelu")?;
        fields.no_dropout("vision_config.dropout_prob")?;
        fields.expect::<usize>("vision_config.in_channels", "3")?;
        let patch_size = fields.size("vision_config.patch_size")?;
        let image_size = fields.size("vision_config.image_size")?;
        let grid = grid("vision_config.image_size", image_size, patch_size)?;
        let positions: usize = fields.required("vision_config.num_positions")?;
        if grid * grid + 1 != positions {
            return Err(ConfigError::Inconsistent {
                field: "vision_config.num_positions",
                found: positions,
                reason: format!("a picture has {grid} x {grid} patches, and one position more"),
            });
        }
        let (width, heads) = (fields.size(WIDTH)?, fields.size("vision_config.num_heads")?);
        let head_dim = divisible(WIDTH, width, heads)?;
        at_most("vision_config.hidden_size / num_heads", head_dim, 128)?;
        Ok(Self {
            width,
            heads,
            head_dim,
            inner: fields.size("vision_config.intermediate_size")?,
            layers: fields.size("vision_config.num_hidden_layers")?,
            patch_size,
            image_size,
            eps: fields.positive("vision_config.layer_norm_eps")?,
        })
    }
}
