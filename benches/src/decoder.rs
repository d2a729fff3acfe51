//! Language model for benchmarks.

use crate::Result;
use kernels::DType;
use models::ModelOptions;
use models::config::LanguageConfig;
use models::minicpm::MiniCpm;
use models::minicpm::config::{Family, MiniCpmConfig, Release, SlicingConfig, VisionConfig};
use models::processor::Normalization;

/// Decoder `language` with a minimal vision tower that no text uses.
///
/// # Errors
/// When the configuration is invalid.
pub fn decoder(language: LanguageConfig, dtype: DType) -> Result<MiniCpm> {
    let config = MiniCpmConfig {
        family: Family::Vision,
        release: Release::V2_6,
        language,
        long_rope: None,
        tie_word_embeddings: false,
        vision: VisionConfig {
            hidden_size: 8,
            intermediate_size: 12,
            num_layers: 1,
            num_heads: 2,
            head_dim: 4,
            patch_size: 2,
            grid_side: 5,
            layer_norm_eps: 1e-6,
        },
        query_num: 2,
        drop_vision_last_layer: false,
        vision_batch_size: 16,
        use_image_id: true,
        slicing: SlicingConfig {
            max_slice_nums: 9,
            scale_resolution: 4,
            patch_size: 2,
        },
    };
    let normalization = Normalization::new([0.5; 3], [0.5; 3])?;
    Ok(MiniCpm::new(
        config,
        normalization,
        ModelOptions::new(dtype),
    )?)
}
