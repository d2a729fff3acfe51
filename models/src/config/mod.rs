//! Reader of `config.json`: typed fields by dotted path, with the bounds and errors that all families share.

mod language;

pub use self::language::LanguageConfig;
pub(crate) use self::language::{HeadDim, LanguageKeys};
use crate::places;
use crate::quantization::QuantizedWeights;
use crate::sat;
use kernels::{Codebook, Quantization};
use serde::de::{DeserializeOwned, Error as _};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Bound of a size without an entry in [`BOUNDS`].
const OTHER_BOUND: usize = 1 << 16;
/// Largest accepted sizes, by the last name of the field's path. Each is several times that of any published model, and
/// small enough that planning a model of these sizes takes seconds.
const BOUNDS: [(&str, usize); 19] = [
    ("num_hidden_layers", 256),
    ("num_layers", 256),
    ("layers", 256),
    ("depth", 256),
    ("num_attention_heads", 1 << 10),
    ("num_key_value_heads", 1 << 10),
    ("multi_query_group_num", 1 << 10),
    ("num_heads", 1 << 10),
    ("intermediate_size", 1 << 18),
    ("ffn_hidden_size", 1 << 18),
    ("vocab_size", 1 << 22),
    ("padded_vocab_size", 1 << 22),
    ("query_num", 1 << 12),
    ("max_slice_nums", 1 << 8),
    ("image_size", 1 << 12),
    ("cross_image_size", 1 << 12),
    ("scale_resolution", 1 << 11),
    ("patch_size", 1 << 8),
    ("longest_edge", 1 << 28),
];
/// Largest number of patches along one side of an image.
pub(crate) const MAX_GRID: usize = 1 << 8;
/// Keys of the language model that decide what it computes.
const LANGUAGE_KEYS: [&str; 20] = [
    "add_qkv_bias",
    "attention_bias",
    "ffn_hidden_size",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "kv_channels",
    "layernorm_epsilon",
    "multi_query_group_num",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_layers",
    "num_multi_query_heads",
    "padded_vocab_size",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_theta",
    "vocab_size",
];

/// The parsed content of a model's `config.json`, with its path for error messages.
#[derive(Debug)]
pub(crate) struct ConfigFile {
    path: PathBuf,
    root: Map<String, Value>,
}

impl ConfigFile {
    /// Reads `config.json` of the model directory `dir`; `dir` may also be the file itself, or several directories
    /// ([`places`]). A SAT checkpoint has a `model_config.json` in its place.
    ///
    /// # Errors
    /// [`ConfigError::Read`], or as [`ConfigFile::parse`].
    pub(crate) fn load(dir: &Path) -> Result<Self, ConfigError> {
        let main = places::main(dir);
        let path = if main.is_file() {
            main
        } else {
            main.join("config.json")
        };
        // Other trainers' checkpoints have a configuration of their own.
        if !path.exists() && path.parent().is_some_and(sat::is_checkpoint) {
            let root = sat::config::hub(dir);
            let root = root.map_err(|error| ConfigError::Json {
                path: places::main(dir).join(sat::config::FILE),
                source: serde_json::Error::custom(error),
            })?;
            return Ok(Self { path, root });
        }
        match crate::text::read_regular(&path) {
            Ok(bytes) => Self::parse(&bytes, &path),
            Err(source) => Err(ConfigError::Read { path, source }),
        }
    }

    /// Parses the content of a `config.json`; `path` is named in errors.
    ///
    /// # Errors
    /// [`ConfigError::Json`] unless it is a JSON object.
    pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Self, ConfigError> {
        let path = path.to_owned();
        match serde_json::from_slice(bytes) {
            Ok(root) => Ok(Self { path, root }),
            Err(source) => Err(ConfigError::Json { path, source }),
        }
    }

    /// The top-level fields of the file.
    pub(crate) fn fields(&self) -> Fields<'_> {
        Fields {
            path: &self.path,
            root: &self.root,
        }
    }
}

/// Fields of a `config.json`, or of one object in it. A field is named by its path, such as `vision_config.patch_size`.
///
/// As in transformers, null is a value: no default replaces it. It is false where a flag is expected, an object without
/// fields where an object is, and an error where a number or a text is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    path: &'a Path,
    root: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn invalid(&self, reason: String) -> ConfigError {
        ConfigError::Json {
            path: self.path.to_owned(),
            source: serde_json::Error::custom(reason),
        }
    }

    /// The value at `field`, null included, unless it or an object on the way to it is absent.
    fn value(&self, field: &str) -> Result<Option<&'a Value>, ConfigError> {
        let mut names = field.split('.');
        let mut found = self.root.get(names.next().unwrap_or_default());
        for name in names {
            found = match found {
                None | Some(Value::Null) => return Ok(None),
                Some(Value::Object(inside)) => inside.get(name),
                Some(_) => {
                    return Err(self.invalid(format!("{field}: {name} is no field of an object")));
                }
            };
        }
        Ok(found)
    }

    /// The object at `field`; `None` if it is absent or null, from which transformers makes the same object.
    ///
    /// # Errors
    /// [`ConfigError::Json`] if it is no object.
    pub(crate) fn section(&self, field: &str) -> Result<Option<Self>, ConfigError> {
        match self.value(field)? {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(root)) => Ok(Some(Self { root, ..*self })),
            Some(_) => Err(self.invalid(format!("{field} is no object"))),
        }
    }

    /// Names and values of all fields.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.root.iter()
    }

    /// The fields of the language model: those of `text_config`, or, in the flat layout, of this object.
    ///
    /// # Errors
    /// [`ConfigError::Json`] if a field has one value here and another in `text_config`: a class reads one of the two.
    pub(crate) fn language(&self) -> Result<Self, ConfigError> {
        let Some(text) = self.section("text_config")? else {
            return Ok(*self);
        };
        let equal = |a: &Value, b: &Value| a == b || (a.is_number() && a.as_f64() == b.as_f64());
        for key in LANGUAGE_KEYS {
            if let (Some(nested), Some(flat)) = (text.root.get(key), self.root.get(key))
                && !equal(nested, flat)
            {
                return Err(self.invalid(format!(
                    "{key} is {flat}, but text_config.{key} is {nested}"
                )));
            }
        }
        Ok(text)
    }

    /// The quantized weights that `quantization_config` declares: those of bitsandbytes.
    ///
    /// # Errors
    /// [`ConfigError::Quantized`] for another way of quantization.
    pub(crate) fn quantization(&self) -> Result<Option<QuantizedWeights>, ConfigError> {
        for field in ["quantization_config", "text_config.quantization_config"] {
            if let Some(settings) = self.section(field)? {
                let method: Option<String> = settings.nullable("quant_method")?;
                let four = settings.flag("load_in_4bit", false)?;
                let eight = settings.flag("load_in_8bit", false)?;
                let codebook: Option<String> = settings.nullable("bnb_4bit_quant_type")?;
                let codebook = match codebook.as_deref() {
                    Some("nf4") => Some(Codebook::Nf4),
                    // The default of transformers.
                    Some("fp4") | None => Some(Codebook::Fp4),
                    Some(_) => None,
                };
                let double = settings.flag("bnb_4bit_use_double_quant", false)?;
                let quantization = match (four, eight, codebook) {
                    (true, false, Some(codebook)) => Some(Quantization::four_bit(codebook, double)),
                    (false, true, _) => Some(Quantization::Int8),
                    _ => None,
                };
                let ours = method
                    .as_deref()
                    .is_none_or(|method| method == "bitsandbytes");
                let Some(quantization) = quantization.filter(|_| ours) else {
                    let method = method.unwrap_or_else(|| "unknown".to_owned());
                    return Err(ConfigError::Quantized { method });
                };
                let skip: Option<Vec<String>> = settings.nullable("llm_int8_skip_modules")?;
                let skip = skip.unwrap_or_default();
                return Ok(Some(QuantizedWeights::Declared { quantization, skip }));
            }
        }
        Ok(None)
    }

    /// The flag `field` of this object or, where it lacks the field, of `text`, its language model; false if both lack it.
    ///
    /// # Errors
    /// As [`Fields::flag`].
    pub(crate) fn flag_of_both(&self, field: &str, text: Self) -> Result<bool, ConfigError> {
        let nested = text.flag(field, false)?;
        self.flag(field, nested)
    }

    /// Fails if the output head of this object or of `text`, its language model, has the weight of the token embedding.
    ///
    /// # Errors
    /// As [`Fields::expect_flag`].
    pub(crate) fn untied(&self, text: Self) -> Result<(), ConfigError> {
        [*self, text]
            .iter()
            .try_for_each(|fields| fields.expect_flag("tie_word_embeddings", false))
    }

    /// The value of `field`, if present; null is an error unless `T` has a value for it.
    ///
    /// # Errors
    /// [`ConfigError::Json`] if it has another type.
    pub(crate) fn optional<T: DeserializeOwned>(
        &self,
        field: &str,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(field)? else {
            return Ok(None);
        };
        match T::deserialize(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) if value.is_null() => Err(self.invalid(format!(
                "{field} is null, which no default replaces: give it a value or remove it"
            ))),
            Err(error) => Err(self.invalid(format!("{field}: {error}"))),
        }
    }

    /// The value of `field`; `None` if it is absent, or null where transformers treats null as absent.
    ///
    /// # Errors
    /// [`ConfigError::Json`] if it has another type.
    pub(crate) fn nullable<T: DeserializeOwned>(
        &self,
        field: &str,
    ) -> Result<Option<T>, ConfigError> {
        Ok(self.optional::<Option<T>>(field)?.flatten())
    }

    /// The flag `field`, or `default` if it is absent. Null is false.
    ///
    /// # Errors
    /// [`ConfigError::Json`] if it is no flag.
    pub(crate) fn flag(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        let found = self.optional::<Option<bool>>(field)?;
        Ok(found.map_or(default, Option::unwrap_or_default))
    }

    /// The value of the field called `field`, which must be present.
    ///
    /// # Errors
    /// [`ConfigError::Json`] if it is missing or has another type.
    pub(crate) fn required<T: DeserializeOwned>(&self, field: &str) -> Result<T, ConfigError> {
        match self.optional(field)? {
            Some(value) => Ok(value),
            None => Err(self.invalid(format!("missing field `{field}`"))),
        }
    }

    /// The value of the field called `field`, or `default` if it is absent.
    ///
    /// # Errors
    /// As [`Fields::optional`].
    pub(crate) fn or<T: DeserializeOwned>(
        &self,
        field: &str,
        default: T,
    ) -> Result<T, ConfigError> {
        Ok(self.optional(field)?.unwrap_or(default))
    }

    /// The size `field`, or `other` where it is null; it must be present.
    ///
    /// # Errors
    /// As [`Fields::required`] and [`size`].
    pub(crate) fn size_or_null(
        &self,
        field: &'static str,
        other: usize,
    ) -> Result<usize, ConfigError> {
        size(
            field,
            self.required::<Option<usize>>(field)?.unwrap_or(other),
        )
    }

    /// The size `field`, within the bounds of [`size`].
    ///
    /// # Errors
    /// As [`Fields::required`] and [`size`].
    pub(crate) fn size(&self, field: &'static str) -> Result<usize, ConfigError> {
        size(field, self.required(field)?)
    }

    /// The size `field`, as [`Fields::size`], or `default` if the field is absent.
    ///
    /// # Errors
    /// As [`Fields::optional`] and [`size`].
    pub(crate) fn size_or(
        &self,
        field: &'static str,
        default: usize,
    ) -> Result<usize, ConfigError> {
        size(field, self.or(field, default)?)
    }

    /// The positive number `field`.
    ///
    /// # Errors
    /// As [`Fields::required`] and [`positive`].
    pub(crate) fn positive(&self, field: &'static str) -> Result<f64, ConfigError> {
        positive(field, self.required(field)?)
    }

    /// The positive number `field`, as [`Fields::positive`], or `default` if the field is absent.
    ///
    /// # Errors
    /// As [`Fields::optional`] and [`positive`].
    pub(crate) fn positive_or(
        &self,
        field: &'static str,
        default: f64,
    ) -> Result<f64, ConfigError> {
        positive(field, self.or(field, default)?)
    }

    /// Fails unless `field` is absent or prints as `expected`.
    ///
    /// # Errors
    /// As [`Fields::optional`] and [`expect`].
    pub(crate) fn expect<T: DeserializeOwned + ToString>(
        &self,
        field: &'static str,
        expected: &'static str,
    ) -> Result<(), ConfigError> {
        let found = self.optional::<T>(field)?.map(|found| found.to_string());
        expect(field, found.as_deref(), expected)
    }

    /// Fails unless the flag `field` is absent or `expected`. Null is false.
    ///
    /// # Errors
    /// As [`Fields::flag`] and [`expect`].
    pub(crate) fn expect_flag(
        &self,
        field: &'static str,
        expected: bool,
    ) -> Result<(), ConfigError> {
        match self.flag(field, expected)? {
            found if found == expected => Ok(()),
            found => Err(unsupported(
                field,
                found.to_string(),
                if expected { "true" } else { "false" },
            )),
        }
    }

    /// Fails if `field` is present and not `expected`, which other fields imply. Null is absent.
    ///
    /// # Errors
    /// [`ConfigError::Inconsistent`].
    pub(crate) fn implied(&self, field: &'static str, expected: usize) -> Result<(), ConfigError> {
        match self.nullable(field)? {
            Some(found) => same(field, found, expected),
            None => Ok(()),
        }
    }

    /// Fails if a layer has another attention than to all earlier tokens.
    ///
    /// # Errors
    /// As [`Fields::optional`]; [`ConfigError::Unsupported`] for another type of layer.
    pub(crate) fn full_attention(&self) -> Result<(), ConfigError> {
        let types: Vec<String> = self.nullable("layer_types")?.unwrap_or_default();
        let other = types.into_iter().find(|kind| kind != "full_attention");
        expect("layer_types", other.as_deref(), "full_attention")
    }

    /// Fails unless the dropout `field` is absent or zero.
    ///
    /// # Errors
    /// As [`Fields::optional`]; [`ConfigError::Unsupported`] for another value.
    pub(crate) fn no_dropout(&self, field: &'static str) -> Result<(), ConfigError> {
        let found: f64 = self.or(field, 0.0)?;
        if found == 0.0 {
            Ok(())
        } else {
            Err(unsupported(field, found.to_string(), "0"))
        }
    }

    /// The ids of `eos_token_id` of this object or, where it has none, of `text`, its language model.
    ///
    /// # Errors
    /// As [`Fields::optional`].
    pub(crate) fn eos_ids_of_both(&self, text: Self) -> Result<Vec<i32>, ConfigError> {
        let own = self.eos_ids()?;
        own.map_or_else(|| Ok(text.eos_ids()?.unwrap_or_default()), Ok)
    }

    /// The ids of `eos_token_id`, if present: one token or several.
    ///
    /// # Errors
    /// As [`Fields::optional`].
    pub(crate) fn eos_ids(&self) -> Result<Option<Vec<i32>>, ConfigError> {
        let ids = self.nullable::<EosIds>("eos_token_id")?;
        Ok(ids.map(|ids| match ids {
            EosIds::One(id) => vec![id],
            EosIds::Several(ids) => ids,
        }))
    }
}

/// Settings of rotary positions: `rope_parameters` (transformers 5) or `rope_scaling`, and the flat fields of transformers 4.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rope<'a> {
    flat: Fields<'a>,
    nested: Option<Fields<'a>>,
}

impl<'a> Rope<'a> {
    /// The settings beside `fields`, which must be of the default type.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`] for scaled positions; [`ConfigError::Json`] for settings per type of layer.
    pub(crate) fn read(fields: Fields<'a>) -> Result<Self, ConfigError> {
        Self::read_kinds(fields, &["default"])
    }

    /// As [`Rope::read`], for settings of one of the types `kinds`; the first is the default.
    ///
    /// # Errors
    /// As [`Rope::read`].
    pub(crate) fn read_kinds(
        fields: Fields<'a>,
        kinds: &[&'static str],
    ) -> Result<Self, ConfigError> {
        let nested = match fields.section("rope_parameters")? {
            None => fields.section("rope_scaling")?,
            nested => nested,
        };
        if let Some(nested) = nested {
            for field in ["rope_type", "type"] {
                let kind = nested.optional::<String>(field)?;
                if !kind.as_deref().is_some_and(|kind| kinds.contains(&kind)) {
                    expect("rope_parameters.rope_type", kind.as_deref(), kinds[0])?;
                }
            }
            if let Some((kind, _)) = nested.root.iter().find(|(_, value)| value.is_object()) {
                return Err(fields.invalid(format!(
                    "rope_parameters.{kind}: settings per type of layer are not supported"
                )));
            }
        }
        Ok(Self {
            flat: fields,
            nested,
        })
    }

    /// The positive number `field`, or `default` if it is absent.
    ///
    /// # Errors
    /// As [`positive`]; [`ConfigError::Json`] if both layouts have it, with different values.
    pub(crate) fn number(&self, field: &'static str, default: f64) -> Result<f64, ConfigError> {
        let flat = self.flat.optional::<f64>(field)?;
        match (self.own::<f64>(field)?, flat) {
            (Some(nested), Some(flat)) if nested != flat => Err(self.flat.invalid(format!(
                "{field} is {flat}, but rope_parameters.{field} is {nested}"
            ))),
            (nested, flat) => positive(field, nested.or(flat).unwrap_or(default)),
        }
    }

    /// Fails if `field` is present and not `expected`, a constant of the published code or implied by other fields.
    ///
    /// # Errors
    /// As [`Rope::number`]; [`ConfigError::Json`] for another value.
    pub(crate) fn constant(&self, field: &'static str, expected: f64) -> Result<(), ConfigError> {
        match self.number(field, expected)? {
            found if found == expected => Ok(()),
            found => Err(self.flat.invalid(format!(
                "{field} is {found}, but the published code uses {expected}"
            ))),
        }
    }

    /// The value of `field` in the nested object, if present.
    ///
    /// # Errors
    /// As [`Fields::optional`].
    pub(crate) fn own<T: DeserializeOwned>(&self, field: &str) -> Result<Option<T>, ConfigError> {
        self.nested
            .map_or(Ok(None), |nested| nested.optional(field))
    }
}

/// `eos_token_id`.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected a token id or a list of them")]
enum EosIds {
    One(i32),
    Several(Vec<i32>),
}

/// Gives the configuration of a family, which has `fn read(Fields<'_>)`, the two ways to open a file.
macro_rules! reads_config_json {
    ($config:ty) => {
        impl $config {
            /// Reads `config.json` of the model directory `dir`.
            ///
            /// # Errors
            /// [`ConfigError`] if the file is missing or invalid, or describes a model that is not supported.
            pub fn load(dir: &std::path::Path) -> Result<Self, ConfigError> {
                Self::read($crate::config::ConfigFile::load(dir)?.fields())
            }

            /// Parses the content of a `config.json`; `path` is named in errors.
            ///
            /// # Errors
            /// As `load`.
            pub fn parse(bytes: &[u8], path: &std::path::Path) -> Result<Self, ConfigError> {
                Self::read($crate::config::ConfigFile::parse(bytes, path)?.fields())
            }
        }
    };
}
pub(crate) use reads_config_json;

/// Why a `config.json` cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the `config.json`.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file is not JSON, lacks a field or has one of the wrong type.
    #[error("{} is not a valid model configuration", path.display())]
    Json {
        /// Path of the `config.json`.
        path: PathBuf,
        /// Line and column, or the field, and the cause.
        source: serde_json::Error,
    },
    /// The model family of the file is not supported.
    #[error("model type \"{found}\" is not supported, expected one of {}", crate::families::MODEL_TYPES.join(", "))]
    UnsupportedModel {
        /// The `model_type` of the file, empty if it has none.
        found: String,
    },
    /// The checkpoint was recognized and is not supported.
    #[error("{name} is not supported: {reason}; the nearest that works is {nearest}")]
    KnownCheckpoint {
        /// Name of the checkpoint.
        name: String,
        /// What this program lacks for it.
        reason: &'static str,
        /// Name of the nearest checkpoint that works.
        nearest: &'static str,
    },
    /// The weights are quantized.
    #[error(
        "quantization_config says that the weights are quantized ({method}); this model reads f32, bf16, f16 and those of bitsandbytes"
    )]
    Quantized {
        /// The `quant_method` of the file, or `unknown`.
        method: String,
    },
    /// A field has an unsupported value.
    #[error("{field} = {found} is not supported, expected {expected}")]
    Unsupported {
        /// Name of the field.
        field: &'static str,
        /// Value of the field in the file.
        found: String,
        /// The value or values that are supported.
        expected: &'static str,
    },
    /// Two sizes contradict each other, or one is out of range.
    #[error("{field} = {found} is invalid: {reason}")]
    Inconsistent {
        /// Name of the field.
        field: &'static str,
        /// Value of the field in the file.
        found: usize,
        /// The rule that the value breaks.
        reason: String,
    },
}

/// The error of an unsupported value.
pub(crate) fn unsupported(
    field: &'static str,
    found: String,
    expected: &'static str,
) -> ConfigError {
    ConfigError::Unsupported {
        field,
        found,
        expected,
    }
}

/// Fails unless `found` is absent or `expected`.
pub(crate) fn expect(
    field: &'static str,
    found: Option<&str>,
    expected: &'static str,
) -> Result<(), ConfigError> {
    match found {
        Some(found) if found != expected => Err(unsupported(field, found.to_owned(), expected)),
        _ => Ok(()),
    }
}

/// `found`, which must be a positive number.
pub(crate) fn positive(field: &'static str, found: f64) -> Result<f64, ConfigError> {
    if found > 0.0 && found.is_finite() {
        return Ok(found);
    }
    Err(unsupported(field, found.to_string(), "a positive number"))
}

/// Patches along one side of an image, of which `side` and `patch` are the sides in pixels.
pub(crate) fn grid(field: &'static str, side: usize, patch: usize) -> Result<usize, ConfigError> {
    at_most(
        field,
        size(field, divisible(field, side, patch)?)?,
        MAX_GRID,
    )
}

/// Fails unless `found` is `expected`.
pub(crate) fn same(field: &'static str, found: usize, expected: usize) -> Result<(), ConfigError> {
    if found == expected {
        return Ok(());
    }
    Err(ConfigError::Inconsistent {
        field,
        found,
        reason: format!("it must be {expected}"),
    })
}

/// `found`, which must be at least 1 and at most the field's bound.
pub(crate) fn size(field: &'static str, found: usize) -> Result<usize, ConfigError> {
    if found == 0 {
        let reason = "it must be at least 1".to_owned();
        return Err(ConfigError::Inconsistent {
            field,
            found,
            reason,
        });
    }
    let name = field.rsplit(['.', ' ']).next().unwrap_or(field);
    let bound = BOUNDS.iter().find(|(known, _)| *known == name);
    at_most(field, found, bound.map_or(OTHER_BOUND, |(_, bound)| *bound))
}

/// `found`, which must be at most `limit`.
pub(crate) fn at_most(
    field: &'static str,
    found: usize,
    limit: usize,
) -> Result<usize, ConfigError> {
    if found <= limit {
        return Ok(found);
    }
    let reason = format!("it must be at most {limit}");
    Err(ConfigError::Inconsistent {
        field,
        found,
        reason,
    })
}

/// `found / divisor`, which must leave no rest.
pub(crate) fn divisible(
    field: &'static str,
    found: usize,
    divisor: usize,
) -> Result<usize, ConfigError> {
    if divisor > 0 && found.is_multiple_of(divisor) {
        return Ok(found / divisor);
    }
    let reason = format!("it must be a multiple of {divisor}");
    Err(ConfigError::Inconsistent {
        field,
        found,
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(error: ConfigError) -> String {
        let ConfigError::Json { source, .. } = error else {
            panic!("{error}");
        };
        source.to_string()
    }

    #[test]
    fn errors_name_a_field_by_its_path() {
        let bytes = br#"{"a": {"b": 3, "c": "x", "d": null}, "e": [1]}"#;
        let file = ConfigFile::parse(bytes, Path::new("config.json")).unwrap();
        let fields = file.fields();
        assert_eq!(fields.size("a.b").unwrap(), 3);
        assert!(reason(fields.or("a.d", 7).unwrap_err()).contains("a.d is null"));
        assert_eq!(fields.nullable::<usize>("a.d").unwrap(), None);
        assert!(!fields.flag("a.d", true).unwrap(), "null is false");
        assert!(fields.flag("a.x", true).unwrap(), "absent is the default");
        assert_eq!(fields.size_or_null("a.d", 7).unwrap(), 7);
        assert_eq!(fields.or("f.b", 7).unwrap(), 7);
        assert_eq!(
            reason(fields.size("a.x").unwrap_err()),
            "missing field `a.x`"
        );
        assert!(reason(fields.size("a.c").unwrap_err()).starts_with("a.c: invalid type"));
        assert!(reason(fields.or("e.b", 7).unwrap_err()).contains("e.b"));
        assert!(fields.section("a.b").is_err());
        let inside = fields.section("a").unwrap().unwrap();
        assert_eq!(inside.size("b").unwrap(), 3);
    }
}
