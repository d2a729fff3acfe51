//! Choice of the `config.json`: a file, a directory that contains one, or the name of a published model.

use crate::lang::{Text, both, text};
use std::fs;
use std::path::Path;

use crate::error::{ErrorCode, Failure};

/// Built-in configurations with the sizes of published models.
pub(super) const PUBLISHED: [(&str, &str); 12] = [
    ("minicpm-v-2_6", include_str!("configs/minicpm-v-2_6.json")),
    ("minicpm-o-2_6", include_str!("configs/minicpm-o-2_6.json")),
    ("cogvlm-chat", include_str!("configs/cogvlm-chat.json")),
    ("cogagent-chat", include_str!("configs/cogagent-chat.json")),
    (
        "cogvlm2-llama3-chat-19b",
        include_str!("configs/cogvlm2-llama3-chat-19b.json"),
    ),
    ("glm-4v-9b", include_str!("configs/glm-4v-9b.json")),
    (
        "glm-4.1v-9b-thinking",
        include_str!("configs/glm-4.1v-9b-thinking.json"),
    ),
    ("minicpm-v-4_5", include_str!("configs/minicpm-v-4_5.json")),
    ("minicpm-o-4_5", include_str!("configs/minicpm-o-4_5.json")),
    (
        "cogagent-9b-20241220",
        include_str!("configs/cogagent-9b-20241220.json"),
    ),
    (
        "glm-4.6v-flash",
        include_str!("configs/glm-4.6v-flash.json"),
    ),
    ("glm-ocr", include_str!("configs/glm-ocr.json")),
];

/// Content of a model's `config.json`, with the file or published model that it comes from.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) bytes: Vec<u8>,
    origin: String,
}

impl Config {
    /// Failure for a configuration from which no model can be made.
    pub(super) fn unusable(&self, cause: impl Into<Text>) -> Failure {
        let title = text!(
            "cannot make a model from {}",
            "无法根据 {} 生成模型",
            self.origin
        );
        Failure::new(ErrorCode::ModelFiles, title, cause).next(text!(
            "use the config.json of a supported model, or the name of a published one: {}",
            "请使用受支持的模型的 config.json，或某个已发布模型的名称：{}",
            names()
        ))
    }
}

/// Name and `config.json` of the published model that a path names: by its last part, so a name on the Hub works too.
pub(in crate::commands) fn published(named: &Path) -> Option<(&'static str, &'static str)> {
    let last = named.file_name()?;
    let mut known = PUBLISHED.into_iter();
    known.find(|(name, _)| last.eq_ignore_ascii_case(name))
}

/// Finds the configuration that `--model-config` names. An existing file or directory wins over a built-in name.
///
/// # Errors
/// When the flag is missing (exit 2), or no file, directory or built-in model has this name (exit 10).
pub(super) fn find(named: Option<&Path>) -> Result<Config, Failure> {
    let named = named.ok_or_else(|| {
        Failure::usage(
            both("--model-config is missing", "缺少 --model-config"),
            both("sizes come from a config.json", "各项大小来自 config.json"),
        )
        .next(text!(
            "give a file, a directory, or one of {}",
            "请指定文件、目录或以下之一：{}",
            names()
        ))
    })?;
    let file = match named.is_dir() {
        true => named.join("config.json"),
        false => named.to_owned(),
    };
    let read = fs::read(&file);
    match (read, published(named)) {
        (Ok(bytes), _) => Ok(Config {
            bytes,
            origin: file.display().to_string(),
        }),
        (Err(_), Some((name, text))) => Ok(Config {
            bytes: text.as_bytes().to_vec(),
            origin: format!("the published {name}"),
        }),
        (Err(error), None) => {
            let failure = Failure::io(ErrorCode::ModelFiles, both("read", "读取"), &file, &error);
            Err(failure.next(text!(
                "give a file, a directory, or one of {}",
                "请指定文件、目录或以下之一：{}",
                names()
            )))
        }
    }
}

fn names() -> String {
    PUBLISHED.map(|(name, _)| name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_found_by_file_directory_or_name() {
        let temp = tempfile::tempdir().expect("temp dir");
        let file = temp.path().join("config.json");
        fs::write(&file, "{}").expect("written");
        for path in [file.as_path(), temp.path()] {
            assert_eq!(find(Some(path)).expect("found").bytes, b"{}");
        }
        let named = find(Some(Path::new("MiniCPM-V-2_6"))).expect("a name");
        assert_eq!(named.bytes, PUBLISHED[0].1.as_bytes());
        assert_eq!(find(None).expect_err("nothing").code.status(), 2);
        let failure = find(Some(Path::new("no/such"))).expect_err("nothing");
        assert_eq!(failure.code.status(), 10);
        assert!(failure.next[0].contains("minicpm-v-2_6"), "{failure}");
    }
}
