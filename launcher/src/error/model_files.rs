//! Diagnosis of a model directory that cannot be used: the real cause, and a next step that helps.

use super::system::system_remedy;
use super::weight_files::{pointer, pointer_report};
use super::{ErrorCode, Failure, chain};
use crate::lang::{Both, Text, both, text};
use models::config::ConfigError;
use models::processor::ProcessorError;
use models::text::TokenizerError;
use models::{OpenError, places, sat};
use serde_json::Value;
use std::error::Error;
use std::path::{Component, Path, PathBuf};

/// Small files that `git clone` without git-lfs may leave as pointers.
const SMALL_FILES: [&str; 12] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "adapter_config.json",
    "adapter_model.safetensors",
    "trained.safetensors",
];
/// Next step after an adapter that is not implemented.
const ADAPTER_REMEDY: Both = both(
    "merge it into its base model in peft (merge_and_unload, then save_pretrained), and give the merged directory to --model",
    "请用 peft 把它合并到基座模型中（先 merge_and_unload，再 save_pretrained），然后把合并后的目录交给 --model",
);
/// Repositories on the Hub by a word in `config.json`: of the tokenizer, whose files are not always beside the weights.
const TOKENIZERS: [(&str, &str); 9] = [
    ("minicpmv", "openbmb/MiniCPM-V-2_6"),
    ("minicpmo", "openbmb/MiniCPM-o-2_6"),
    ("chatglm", "zai-org/glm-4v-9b"),
    ("glm46v", "zai-org/GLM-4.6V-Flash"),
    ("glm_ocr", "zai-org/GLM-OCR"),
    ("glm4v", "zai-org/GLM-4.1V-9B-Thinking"),
    ("num_multi_query_heads", "zai-org/cogvlm2-llama3-chat-19B"),
    ("CogVLMForCausalLM", "lmsys/vicuna-7b-v1.5"),
    ("CogAgentForCausalLM", "lmsys/vicuna-7b-v1.5"),
];

/// The base model of the adapters or parts in `dir` is not in `base`, where it was when they were trained.
pub(crate) fn moved_base(dir: &Path, base: &Path) -> Failure {
    Failure::new(
        ErrorCode::ModelFiles,
        text!(
            "the base model of {} is not there",
            "{} 的基座模型不在原处",
            dir.display()
        ),
        text!("{} does not exist", "{} 不存在", base.display()),
    )
}

/// Fails if the model or adapter directory `dir` is absent, has git-lfs pointers in place of files, or an adapter that is
/// not implemented. `doing` is the step that needs it. `dir` may also be a `config.json`.
pub(crate) fn check_directory(doing: impl Into<Text>, dir: &Path) -> Result<(), Failure> {
    let doing = doing.into();
    if dir.is_file() {
        return Ok(());
    }
    if let Some(other) = places::without_files(dir) {
        return Err(Failure::new(
            ErrorCode::ModelFiles,
            text!(
                "cannot {doing}: {} is of no use",
                "无法{doing}：{} 没有用处",
                other.display()
            ),
            both(
                "it has neither tokenizer.json nor tokenizer.model, nor ranks of a SAT checkpoint",
                "其中没有 tokenizer.json 或 tokenizer.model，也没有 SAT 检查点的 rank",
            ),
        )
        .next(both(
            "give --tokenizer the directory of the tokenizer's files",
            "请把分词器文件所在的目录交给 --tokenizer",
        )));
    }
    for dir in places::directories(dir) {
        for path in SMALL_FILES.map(|name| dir.join(name)) {
            if let Some((size, hash)) = pointer(&path) {
                return Err(pointer_report(&path, size, &hash));
            }
        }
    }
    models::adapter::check_settings(dir).map_err(|error| {
        Failure::new(
            ErrorCode::ModelFiles,
            text!(
                "cannot {doing}: its adapter cannot be used",
                "无法{doing}：其中的适配器无法使用"
            ),
            chain(&error),
        )
        .next(system_remedy(&error).unwrap_or(ADAPTER_REMEDY))
    })
}

/// Failure of a model directory that cannot be used.
pub(crate) fn unusable(dir: &Path, error: &(dyn Error + 'static)) -> Failure {
    let title = text!(
        "cannot use the model directory {}",
        "无法使用模型目录 {}",
        dir.display()
    );
    let failure = Failure::new(ErrorCode::ModelFiles, title, chain(error));
    if let Some(remedy) = system_remedy(error) {
        return failure.next(remedy);
    }
    let all = places::directories(dir);
    if let Some(missing) = all.iter().find(|dir| !dir.exists()) {
        return absent(missing, error);
    }
    let tokenizer = find::<TokenizerError>(error);
    let lacks_tokenizer = matches!(tokenizer, Some(TokenizerError::NoVocabulary { .. }));
    if lacks_tokenizer && sat::is_checkpoint(&places::main(dir)) {
        return failure.next(both(
            "a SAT checkpoint has no tokenizer: add --tokenizer DIR with that of lmsys/vicuna-7b-v1.5, or for CogVLM2 of meta-llama/Meta-Llama-3-8B-Instruct",
            "SAT 检查点没有分词器：请加上 --tokenizer DIR，其中是 lmsys/vicuna-7b-v1.5 的分词器；CogVLM2 用 meta-llama/Meta-Llama-3-8B-Instruct 的",
        ));
    }
    if (lacks_tokenizer || !dir.join("config.json").is_file())
        && let Some((evidence, next)) = other_directory(dir)
    {
        return failure.evidence(evidence).next(next);
    }
    match find::<ConfigError>(error) {
        Some(ConfigError::Quantized { .. }) => failure
            .next(both("give --model the model's weights that are not quantized (bf16), in most cases the repository without -int4, -AWQ or -GPTQ in its name", "请把该模型未量化（bf16）的权重交给 --model，多数情况下是名称中不带 -int4、-AWQ 或 -GPTQ 的仓库"))
            .next(both("--precision bf16 with --use-lora true needs the least memory; `launcher plan` shows how much", "--precision bf16 加 --use-lora true 需要的内存最少；`launcher plan` 会显示需要多少")),
        _ if lacks_tokenizer => missing_tokenizer(failure, dir),
        _ => failure.next(both("give --model a directory of MiniCPM-V or -o 2.6 or 4.5, CogVLM, CogAgent, CogVLM2, GLM-4V, GLM-4.1V, GLM-4.6V-Flash or GLM-OCR with config.json, its tokenizer files and its safetensors files", "请把 MiniCPM-V 或 -o（2.6 或 4.5）、CogVLM、CogAgent、CogVLM2、GLM-4V、GLM-4.1V、GLM-4.6V-Flash 或 GLM-OCR 的目录交给 --model，其中要有 config.json、分词器文件和 safetensors 文件")),
    }
}

/// What a directory without usable model files is instead, and the next step; `None` if nothing shows it.
pub(super) fn other_directory(dir: &Path) -> Option<(Text, Text)> {
    let has = |name: &str| dir.join(name).exists();
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    let dangling = |name: &&String| {
        let path = dir.join(name);
        path.is_symlink() && !path.exists()
    };
    if let Some(name) = names.iter().find(dangling) {
        return Some((
            text!(
                "{name} is a symbolic link to a file that does not exist",
                "{name} 是符号链接，但它指向的文件不存在"
            ),
            both(
                "copy the directory with cp -L from where its links work, or download it again",
                "请用 cp -L 从链接有效的地方复制该目录，或重新下载",
            )
            .into(),
        ));
    }
    if names.iter().any(|name| name.starts_with("global_step")) || has("zero_to_fp32.py") {
        return Some((
            both("it is a checkpoint of DeepSpeed, whose weights are divided among its ranks", "这是 DeepSpeed 的检查点，其权重分散在各个 rank 中").into(),
            both("join them: python zero_to_fp32.py . NEW --safe_serialization, then copy config.json and the tokenizer files to NEW", "请先合并：python zero_to_fp32.py . NEW --safe_serialization，然后把 config.json 和分词器文件复制到 NEW").into(),
        ));
    }
    let has_ranks = |name: &&String| dir.join(name).join("mp_rank_00_model_states.pt").is_file();
    if !has("latest")
        && let Some(name) = names.iter().find(has_ranks)
    {
        return Some((
            text!(
                "{name} has ranks of a SAT checkpoint, but no file latest names it",
                "{name} 中有 SAT 检查点的 rank，但没有 latest 文件给出它的名称"
            ),
            text!(
                "give {} itself, or write its name to a file latest",
                "请直接指定 {}，或把它的名称写入 latest 文件",
                dir.join(name).display()
            ),
        ));
    }
    let whole = has("model.safetensors") || has("model.safetensors.index.json");
    let parts = ["adapter_config.json", "trained.safetensors"];
    if let Some(name) = parts.into_iter().find(|name| !whole && has(name)) {
        return Some((
            text!("{name} shows that it holds adapters or trained parts, not a whole model", "{name} 表明其中只有适配器或训练过的部分，而不是完整的模型"),
            both("give --model the model that they were trained on (generate and eval take them as --adapter), or write a whole model with `launcher export --merge`", "请把训练它们所用的模型交给 --model（generate 和 eval 用 --adapter 接收它们），或用 `launcher export --merge` 写出完整的模型").into(),
        ));
    }
    None
}

/// The first error of type `T` among `error` and its sources. Errors that show another one as their own count as it.
fn find<'e, T: Error + 'static>(error: &'e (dyn Error + 'static)) -> Option<&'e T> {
    if let Some(found) = error.downcast_ref::<T>() {
        return Some(found);
    }
    if let Some(OpenError::Files(files)) = error.downcast_ref::<OpenError>() {
        return find(files);
    }
    match error.downcast_ref::<ProcessorError>() {
        Some(ProcessorError::Config(config)) => find(config),
        Some(ProcessorError::Tokenizer(tokenizer)) => find(tokenizer),
        _ => find(error.source()?),
    }
}

/// Failure of a directory that does not exist, which may be the name of a model on the Hub.
fn absent(dir: &Path, error: &(dyn Error + 'static)) -> Failure {
    let title = text!(
        "the model directory {} does not exist",
        "模型目录 {} 不存在",
        dir.display()
    );
    match hub_name(dir) {
        Some(name) => Failure::new(
            ErrorCode::ModelFiles,
            title,
            text!("{name} looks like the name of a model on the Hub; this program reads directories and downloads nothing", "{name} 看起来是 Hub 上的模型名称；本程序只读取目录，不会下载"),
        )
        .evidence(chain(error))
        .next(text!("download it first, then run the same command: hf download {name} --local-dir {name}", "请先下载，然后运行同样的命令：hf download {name} --local-dir {name}"
        )),
        None => Failure::new(ErrorCode::ModelFiles, title, chain(error))
            .next(both("give --model the directory with config.json and the weights", "请把含有 config.json 和权重的目录交给 --model")),
    }
}

/// A path as `owner/name`, if it is spelled like that from the current directory and not even the owner exists.
pub(crate) fn hub_name(dir: &Path) -> Option<String> {
    let here = std::env::current_dir().unwrap_or_default();
    let relative: PathBuf = dir.strip_prefix(here).unwrap_or(dir).to_owned();
    let parts: Vec<&str> = relative
        .components()
        .map(|part| match part {
            Component::Normal(name) => name.to_str(),
            _ => None,
        })
        .collect::<Option<_>>()?;
    match parts[..] {
        [owner, name] if dir.parent().is_some_and(|parent| !parent.exists()) => {
            Some(format!("{owner}/{name}"))
        }
        _ => None,
    }
}

fn missing_tokenizer(failure: Failure, dir: &Path) -> Failure {
    let config = std::fs::read_to_string(dir.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_str(&config).unwrap_or_default();
    let has = |word: &str| {
        config.get(word).is_some()
            || config["model_type"] == word
            || config["architectures"][0] == word
    };
    let Some((_, repository)) = TOKENIZERS.iter().find(|(word, _)| has(word)) else {
        return failure.next(both(
            "copy the tokenizer files of the published model into the directory",
            "请把官方发布的模型的分词器文件复制到该目录",
        ));
    };
    failure.next(text!("{repository} publishes this model's tokenizer: hf download {repository} --include 'tokenizer*' 'special_tokens_map.json' --local-dir {}", "该模型的分词器发布在 {repository}：hf download {repository} --include 'tokenizer*' 'special_tokens_map.json' --local-dir {}",
        dir.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        assert_eq!(
            hub_name(Path::new("openbmb/MiniCPM-V-2_6")).as_deref(),
            Some("openbmb/MiniCPM-V-2_6")
        );
        let here = std::env::current_dir().expect("a directory");
        assert!(hub_name(&here.join("nobody/model")).is_some());
        for path in ["model", "a/b/c", "../b", "/nobody/model", "src/nothing"] {
            assert_eq!(hub_name(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn directories_of_other_programs_are_told_apart() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = |name: &str| dir.path().join(name);
        let found = || other_directory(dir.path()).map_or_else(Text::default, |(what, _)| what);
        assert_eq!(found(), "");
        std::fs::write(path("adapter_config.json"), "{}").expect("written");
        assert!(found().contains("holds adapters"));
        std::fs::create_dir(path("1")).expect("made");
        std::fs::write(path("1/mp_rank_00_model_states.pt"), "").expect("written");
        assert!(found().contains("SAT"));
        std::fs::create_dir(path("global_step500")).expect("made");
        assert!(found().contains("DeepSpeed"));
        std::os::unix::fs::symlink("../../blobs/none", path("model.safetensors")).expect("linked");
        assert!(found().contains("model.safetensors is a symbolic link"));
    }

    #[test]
    fn errors_of_the_operating_system_have_their_own_remedy() {
        let dir = tempfile::tempdir().expect("temp dir");
        for (number, word) in [(13, "permission"), (24, "ulimit -n"), (5, "disk")] {
            let source = std::io::Error::from_raw_os_error(number);
            let path = dir.path().join("tokenizer.json");
            let error = ProcessorError::Tokenizer(TokenizerError::Read { path, source });
            let failure = unusable(dir.path(), &error);
            assert!(failure.next[0].contains(word), "{failure}");
        }
    }
}
