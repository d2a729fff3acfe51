//! Readers of untrusted files as functions of bytes, for fuzzers and tests. They are no part of the interface.

use crate::cogvlm::CogConfig;
use crate::config::ConfigError;
use crate::families::Family;
use crate::generation_config::GenerationConfig;
use crate::glm4v::config::Glm4vConfig;
use crate::glm41v::config::Glm41vConfig;
use crate::image::RgbImage;
use crate::image::decode::{Header, ImageError, decode_bytes};
use crate::minicpm::config::MiniCpmConfig;
use crate::text::{Tokenizer, TokenizerError};
use crate::torch_file::{self, TorchError, Wanted};
use crate::weights::{self, WeightError};
use std::path::Path;

/// Reads `bytes` as the header of a safetensors file.
///
/// # Errors
/// [`WeightError`] if the header is not valid.
pub fn weights(bytes: &[u8]) -> Result<(), WeightError> {
    weights::check_bytes(bytes, Path::new("model.safetensors"))
}

/// Reads `bytes` as a file of `torch.save`: as a plain state dict, and as a training checkpoint.
///
/// # Errors
/// [`TorchError`] if neither can be read.
pub fn torch_file(bytes: &[u8]) -> Result<(), TorchError> {
    let plain = torch_file::check_bytes(bytes, Wanted::All);
    torch_file::check_bytes(bytes, Wanted::Entry("module")).or(plain)
}

/// Reads `bytes` as a `config.json` with the reader of the family that it names, and with the readers of all
/// others.
///
/// # Errors
/// [`ConfigError`] if the reader of its own family refuses it, or the family is unknown.
pub fn config(bytes: &[u8]) -> Result<(), ConfigError> {
    let path = Path::new("config.json");
    // A file that is not meant for a family must not harm it either.
    let cog = CogConfig::parse(bytes, path).map(drop);
    let minicpm = MiniCpmConfig::parse(bytes, path).map(drop);
    let glm4v = Glm4vConfig::parse(bytes, path).map(drop);
    let glm41v = Glm41vConfig::parse(bytes, path).map(drop);
    // `generation_config.json` has the same reader.
    drop(GenerationConfig::parse(bytes, path));
    match Family::of_bytes(bytes, path)? {
        Family::CogVlm | Family::CogVlm2 | Family::CogAgent => cog,
        Family::MiniCpm => minicpm,
        Family::Glm4v => glm4v,
        Family::Glm41v => glm41v,
    }
}

/// Header of the image file `bytes`; `None` if it is not usable.
#[must_use]
pub fn header(bytes: &[u8]) -> Option<Header> {
    Header::of(Path::new("picture"), bytes).ok()
}

/// Decodes `bytes` as an image file.
///
/// # Errors
/// [`ImageError`] if the image is damaged, too large or of an unknown format.
pub fn image(bytes: &[u8]) -> Result<RgbImage, ImageError> {
    decode_bytes(Path::new("picture"), bytes)
}

/// Reads `bytes` as one of a tokenizer's files, by its first character, then encodes and decodes sample texts
/// with it.
///
/// # Errors
/// [`TokenizerError`] if the file is not valid, or encoding or decoding fails.
pub fn tokenizer(bytes: &[u8]) -> Result<(), TokenizerError> {
    /// Base tokenizer for a `tokenizer_config.json`.
    const SMALL: &[u8] =
        br#"{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}"#;
    let model = Path::new("tokenizer.model");
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    let tokenizer = if first == Some(&b'{') {
        let path = Path::new("tokenizer.json");
        let config = Path::new("tokenizer_config.json");
        Tokenizer::of_json(bytes, path).or_else(|error| {
            let small = Tokenizer::of_json(SMALL, path)?;
            small.with_config(bytes, config).map_err(|_| error)
        })?
    } else {
        Tokenizer::of_model(bytes, model)?
    };
    for text in [
        "",
        "ab a  b\n\u{e9}\u{4f60}\u{1f600}\0<|user|>",
        "aaaa bbbb 1234",
    ] {
        let ids = tokenizer.encode(text)?;
        let plain = tokenizer.encode_plain(text)?;
        tokenizer.decode(&ids)?;
        tokenizer.decode_verbatim(&plain)?;
    }
    tokenizer.decode(&[0, i32::MAX])?;
    Ok(())
}
