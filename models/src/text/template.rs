//! Chat template of a checkpoint, rendered as in Hugging Face's `transformers`: Jinja with `trim_blocks`
//! and `lstrip_blocks`, Python string methods, `raise_exception` and a `tojson` that escapes nothing.

use std::path::{Path, PathBuf};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Tokenizer, read_optional};

/// Name of the template that is used if a checkpoint has several.
const DEFAULT_NAME: &str = "default";

/// Why a chat template cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file that cannot be read.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file has unexpected content.
    #[error("{} is not valid: {reason}", path.display())]
    Invalid {
        /// Path of the file with the unexpected content.
        path: PathBuf,
        /// What the parser found.
        reason: String,
    },
    /// The model directory holds no template.
    #[error("{} has no chat template", dir.display())]
    Missing {
        /// The model directory that was searched.
        dir: PathBuf,
    },
    /// The template is not valid Jinja.
    #[error("the chat template does not parse")]
    Syntax(#[source] minijinja::Error),
    /// The template failed on a conversation.
    #[error("the chat template fails on a conversation of {messages} messages")]
    Render {
        /// Number of messages in the conversation.
        messages: usize,
        /// Where in the template it failed, and why.
        source: minijinja::Error,
    },
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `user`, `assistant` or `system`.
    pub role: String,
    /// The text of the turn.
    pub content: String,
    /// Text between the role and the line break before the content, as GLM-4 writes the name of a called tool.
    #[serde(skip)]
    pub metadata: String,
    /// Thought before an answer, which some templates write.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reasoning_content: Option<String>,
    /// Whether the data leaves the turn out of the loss. It has an effect on answers only.
    #[serde(skip)]
    pub unsupervised: bool,
}

impl Message {
    /// A turn of `role`, without metadata.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
            metadata: String::new(),
            reasoning_content: None,
            unsupervised: false,
        }
    }
}

/// A chat template, compiled from Jinja, that renders a conversation to prompt text.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    globals: Vec<(&'static str, String)>,
}

impl ChatTemplate {
    /// Loads the chat template of the model directory `dir`: `chat_template.jinja`, otherwise the field
    /// `chat_template` of `tokenizer_config.json` (a text, or a list of which `default` is taken) or of
    /// `chat_template.json`, which processors of transformers 4 saved. The template sees the role tokens of `tokenizer` (such as `bos_token`) as variables.
    ///
    /// # Errors
    /// [`TemplateError`] if there is none or it is not valid.
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let source = find(dir)?;
        let globals = tokenizer
            .named_tokens()
            .map(|(name, text)| (name, text.to_owned()));
        Self::new(source, globals.collect())
    }

    /// Compiles the Jinja template `source`; `globals` are names and values of variables that it may use.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] if it is not valid Jinja.
    pub fn new(
        source: String,
        globals: Vec<(&'static str, String)>,
    ) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(TemplateError::Syntax)?);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(DEFAULT_NAME, source)
            .map_err(TemplateError::Syntax)?;
        Ok(Self {
            environment,
            globals,
        })
    }

    /// Whether the text of the template names `key`, a key of a turn.
    #[must_use]
    pub fn names(&self, key: &str) -> bool {
        let template = self.environment.get_template(DEFAULT_NAME);
        template.is_ok_and(|template| template.source().contains(key))
    }

    /// Renders `messages` to text; with `add_generation_prompt` it ends at the start of the assistant's answer.
    ///
    /// # Errors
    /// [`TemplateError::Render`] if the template fails or rejects the conversation.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        self.render_thinking(messages, add_generation_prompt, None)
    }

    /// As [`ChatTemplate::render`]; the template sees the variable `enable_thinking` if it is given.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_thinking(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
    ) -> Result<String, TemplateError> {
        let failed = |source| TemplateError::Render {
            messages: messages.len(),
            source,
        };
        let globals = self
            .globals
            .iter()
            .map(|(name, text)| (*name, Value::from(text.as_str())));
        let variables = [
            ("messages", Value::from(Serde(messages))),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        let switch = enable_thinking.map(|on| ("enable_thinking", Value::from(on)));
        let context = Value::from_pairs(globals.chain(variables).chain(switch));
        let template = self
            .environment
            .get_template(DEFAULT_NAME)
            .map_err(failed)?;
        template.render(context).map_err(failed)
    }
}

#[derive(Deserialize)]
struct ConfigFile {
    chat_template: Option<TemplateField>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "chat_template must be a text or a list of {name, template}"
)]
enum TemplateField {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

fn find(dir: &Path) -> Result<String, TemplateError> {
    let dir = &crate::places::tokenizer(dir);
    let read = |path: &PathBuf| {
        read_optional(path).map_err(|source| TemplateError::Read {
            path: path.clone(),
            source,
        })
    };
    let path = dir.join("chat_template.jinja");
    if let Some(bytes) = read(&path)? {
        return String::from_utf8(bytes).map_err(|error| TemplateError::Invalid {
            path,
            reason: error.to_string(),
        });
    }
    let missing = || TemplateError::Missing {
        dir: dir.to_owned(),
    };
    let mut field = None;
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let path = dir.join(name);
        if let (None, Some(bytes)) = (&field, read(&path)?) {
            let file: ConfigFile =
                serde_json::from_slice(&bytes).map_err(|error| TemplateError::Invalid {
                    path,
                    reason: error.to_string(),
                })?;
            field = file.chat_template;
        }
    }
    match field.ok_or_else(missing)? {
        TemplateField::One(template) => Ok(template),
        TemplateField::Named(templates) => {
            let default = templates
                .into_iter()
                .find(|template| template.name == DEFAULT_NAME);
            default
                .map(|template| template.template)
                .ok_or_else(missing)
        }
    }
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// JSON as in Python's `json.dumps(value, ensure_ascii=False)`.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let bad = |error: serde_json::Error| {
        minijinja::Error::new(ErrorKind::BadSerialization, error.to_string())
    };
    let mut out = Vec::new();
    if let Some(indent) = indent {
        let spaces = vec![b' '; indent.min(64)];
        let pretty = serde_json::ser::PrettyFormatter::with_indent(&spaces);
        value
            .serialize(&mut serde_json::Serializer::with_formatter(
                &mut out, pretty,
            ))
            .map_err(bad)?;
    } else {
        value
            .serialize(&mut serde_json::Serializer::with_formatter(
                &mut out, Spaced,
            ))
            .map_err(bad)?;
    }
    Ok(Value::from_safe_string(
        String::from_utf8_lossy(&out).into_owned(),
    ))
}

/// A space after every comma and colon.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(b", ")
        }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message::new(role, content)
    }

    fn render(source: &str, generate: bool) -> Result<String, TemplateError> {
        let globals = vec![("eos_token", "<e>".to_owned())];
        let messages = [message("user", " <b>&\"é\" "), message("assistant", "yes")];
        ChatTemplate::new(source.to_owned(), globals)?.render(&messages, generate)
    }

    #[test]
    fn template_blocks_leave_no_blank_lines() {
        let source =
            "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n{% endif %}\n{% endfor %}";
        assert_eq!(render(source, false).unwrap(), "user\nassistant\n");
    }

    #[test]
    fn python_methods_named_tokens_and_the_generation_flag_are_available() {
        let source = "{{ messages[0]['content'].strip() }}{{ eos_token }}{% if add_generation_prompt %}A{% endif %}";
        assert_eq!(render(source, true).unwrap(), "<b>&\"é\"<e>A");
        assert_eq!(render(source, false).unwrap(), "<b>&\"é\"<e>");
    }

    #[test]
    fn tojson_is_python_json_without_escapes() {
        let source = "{{ messages[1] | tojson }}{{ messages[0].content | tojson }}";
        let expected = "{\"role\": \"assistant\", \"content\": \"yes\"}\" <b>&\\\"é\\\" \"";
        assert_eq!(render(source, false).unwrap(), expected);
    }

    #[test]
    fn a_template_can_reject_a_conversation() {
        let error = render("{{ raise_exception('roles must alternate') }}", false).unwrap_err();
        let TemplateError::Render {
            messages: 2,
            source,
        } = error
        else {
            panic!("{error}")
        };
        assert!(source.to_string().contains("roles must alternate"));
        assert!(matches!(
            render("{% for %}", false),
            Err(TemplateError::Syntax(_))
        ));
    }

    #[test]
    fn the_template_file_overrides_the_config_and_lists_have_a_default() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            find(dir.path()),
            Err(TemplateError::Missing { .. })
        ));
        let config = dir.path().join("tokenizer_config.json");
        std::fs::write(&config, r#"{"chat_template": "one"}"#).unwrap();
        assert_eq!(find(dir.path()).unwrap(), "one");
        let list = r#"{"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}"#;
        std::fs::write(&config, list).unwrap();
        assert_eq!(find(dir.path()).unwrap(), "d");
        std::fs::write(dir.path().join("chat_template.jinja"), "file").unwrap();
        assert_eq!(find(dir.path()).unwrap(), "file");
        std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
        std::fs::write(&config, r#"{"chat_template": 3}"#).unwrap();
        assert!(matches!(
            find(dir.path()),
            Err(TemplateError::Invalid { .. })
        ));
    }
}
