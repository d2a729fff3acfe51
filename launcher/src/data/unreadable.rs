//! Why data cannot be read, and what makes it readable.

use std::path::Path;

use models::data::{DATASET_INFO, DataError, DataFormat, data_parts, packing};

use crate::error::{ErrorCode, Failure, chain, hub_name, quoted};
use crate::lang::{Both, Text, both, text};

/// Bytes at the beginning of a file that is no valid JSON in which words of a form are looked for.
const LOOKED_AT_BYTES: usize = 4096;
/// Place of the mark of a tar archive.
const TAR_MARK: std::ops::Range<usize> = 257..262;

/// Why data cannot be read, with the form that it looks like.
pub(super) fn refusal(path: &Path, format: Option<DataFormat>, error: &DataError) -> Failure {
    let title = text!("cannot read {}", "无法读取 {}", path.display());
    let failure = Failure::new(ErrorCode::DataFile, title, chain(error));
    match error {
        DataError::Read { path: file, .. } if !file.exists() => {
            failure.next(remote(path).unwrap_or_else(|| {
                both(
                    "check the path; relative paths start at the current directory",
                    "请检查路径；相对路径以当前目录为起点",
                )
                .into()
            }))
        }
        DataError::Json { path: file, .. } if file.ends_with(DATASET_INFO) => {
            let failure = match remote(path) {
                Some(download) => failure.next(download),
                None => failure,
            };
            failure.next(text!(
                "change the entry in {DATASET_INFO}: `file_name` is a file or directory beside it, with `formatting`, `columns` and `tags`; or give the file itself as --data",
                "请修改 {DATASET_INFO} 中的条目：`file_name` 是它旁边的文件或目录，另有 `formatting`、`columns` 和 `tags`；或直接用 --data 指定该文件"
            ))
        }
        DataError::Json { path, reason, .. } | DataError::Row { path, reason, .. } => {
            // A table in Parquet is read well until its row.
            let line = match error {
                DataError::Json { line, .. } => Some(*line),
                _ => None,
            };
            if let Some(next) = line.and_then(|_| of_another_kind(path)) {
                return failure.next(next);
            }
            let form = looks_like(path).or(format);
            let shape = |form: DataFormat| format!("{}: {}", form.name(), form.shape());
            match (form, format) {
                (Some(form), Some(given)) if form != given => failure.next(text!(
                    "--data-format {}   (the file looks like it: {})",
                    "--data-format {}   (该文件看起来是这种格式：{})",
                    form.name(),
                    form.shape()
                )),
                (None, _) if is_of_the_form(reason) => failure.next(all_forms()),
                (Some(form), _) if is_of_the_form(reason) => failure.next(text!(
                    "write every sample of the file in the form {}; samples of another form go into a file of their own: --data FILE,FILE",
                    "请把文件中的每个样本都写成 {} 格式；其他格式的样本请放入另一个文件：--data FILE,FILE",
                    shape(form)
                )),
                _ => {
                    let failure = match form {
                        Some(form) => failure.next(text!(
                            "the file has the form {}; another form does not help",
                            "该文件是 {} 格式；换一种格式没有用",
                            shape(form)
                        )),
                        None => failure,
                    };
                    let hint = line.and_then(|line| syntax_hint(path, line, reason));
 failure.next(hint.unwrap_or(both(
                        "change or remove what the cause names, or leave out the samples that have it",
                        "请修改或删除原因中指出的内容，或去掉含有它的样本",
                    )))
                }
            }
        }
        DataError::OtherImage { image, .. } => failure.next(text!(
            "magick {0} {0}.png, or with Pillow; then remove {0}",
            "magick {0} {0}.png，或用 Pillow；然后删除 {0}",
            image.display()
        )),
        DataError::UnknownFormat { .. } => failure.next(all_forms()),
        DataError::AmbiguousFormat { .. } => failure.next(both(
            "give the file or directory that holds the samples, or its form with --data-format",
            "请指定包含样本的文件或目录，或用 --data-format 指定其格式",
        )),
        _ => failure.next(both(
            "give a file or directory that holds samples",
            "请指定包含样本的文件或目录",
        )),
    }
}

fn all_forms() -> Text {
    let all = DataFormat::ALL.iter();
    let all: Vec<String> = all
        .map(|format| format!("{} {}", format.name(), format.shape()))
        .collect();
    text!(
        "write the samples in one of the forms {}",
        "请按以下格式之一书写样本：{}",
        all.join("; ")
    )
}

/// How to download data that is given by an address or by its name on the Hub.
fn remote(data: &Path) -> Option<Text> {
    let here = std::env::current_dir().unwrap_or_default();
    data_parts(data).iter().find_map(|part| {
        let part = part.strip_prefix(&here).unwrap_or(part).to_string_lossy();
        let entry = part.split_once(&format!("{DATASET_INFO}#"));
        let name = entry.map_or(&*part, |(_, entry)| entry);
        let name = name.split('#').next().unwrap_or_default();
        // Paths have lost one of the two slashes.
        if let Some((scheme, rest)) = name.split_once(":/") {
            let rest = rest.trim_start_matches('/');
            return Some(match scheme {
                "http" | "https" => text!(
                    "data is not downloaded: curl -LO {scheme}://{rest}, then give --data the file",
                    "数据不会自动下载：请运行 curl -LO {scheme}://{rest}，再用 --data 指定该文件"
                ),
                _ => hub(rest),
            });
        }
        hub_name(Path::new(name)).map(|name| hub(&name))
    })
}

fn hub(name: &str) -> Text {
    text!(
        "{name} looks like the name of a data set on the Hub, and nothing is downloaded. Download it: hf download {name} --repo-type dataset --local-dir {name} (ModelScope: modelscope download --dataset {name} --local_dir {name}), then give --data {name}",
        "{name} 看起来是 Hub 上的数据集名称；本程序不会下载。请先下载：hf download {name} --repo-type dataset --local-dir {name}（ModelScope：modelscope download --dataset {name} --local_dir {name}），再使用 --data {name}"
    )
}

/// The form of the file `path` by its first sample, otherwise by the words at its beginning.
fn looks_like(path: &Path) -> Option<DataFormat> {
    if let Ok(format) = models::data::detect(path) {
        return Some(format);
    }
    let text = std::fs::read(path).ok()?;
    let start = String::from_utf8_lossy(&text[..text.len().min(LOOKED_AT_BYTES)]);
    let words = |words: &[&str]| words.iter().all(|word| start.contains(word));
    [
        (&["conversations", "from"][..], DataFormat::ShareGpt),
        (&["conversations"], DataFormat::Minicpm),
        (&["messages"], DataFormat::Messages),
        (&["instruction", "output"], DataFormat::Alpaca),
        (&["query", "response"], DataFormat::QueryResponse),
    ]
    .into_iter()
    .find_map(|(all, format)| words(all).then_some(format))
}

/// Whether a sample is refused for a key that its form needs, not for what a key says.
fn is_of_the_form(reason: &str) -> bool {
    reason.starts_with("missing field") || reason.ends_with(" is no object")
}

/// What to do with a file that holds no JSON, CSV or Parquet in UTF-8.
fn of_another_kind(path: &Path) -> Option<Text> {
    let bytes = std::fs::read(path).ok()?;
    let begins = |marks: &[&[u8]]| marks.iter().any(|mark| bytes.starts_with(mark));
    if begins(&[b"PAR1"]) {
        return None;
    }
    let file = quoted(&path.display().to_string());
    let ending = path.extension().unwrap_or_default().to_ascii_lowercase();
    if let Some((_, tool)) = packing(&bytes) {
        return Some(text!(
            "{tool} {file} | launcher --data - with the other flags; or unpack the file and give the result as --data",
            "{tool} {file} | launcher --data - 并加上其他参数；或解压后用 --data 指定得到的文件"
        ));
    }
    if begins(&[b"\xff\xfe", b"\xfe\xff"]) {
        return Some(text!(
            "the file is UTF-16: iconv -f UTF-16 -t UTF-8 {file} > utf8.json, then give --data utf8.json",
            "该文件是 UTF-16 编码：请运行 iconv -f UTF-16 -t UTF-8 {file} > utf8.json，再用 --data utf8.json"
        ));
    }
    if bytes.get(TAR_MARK) == Some(b"ustar") {
        return Some(text!(
            "the file is a tar archive: mkdir unpacked && tar -xf {file} -C unpacked, then write unpacked/metadata.jsonl with a line {{\"file_name\": IMAGE, \"text\": TEXT}} for each image, and give --data unpacked",
            "该文件是 tar 归档：请运行 mkdir unpacked && tar -xf {file} -C unpacked，为每张图片在 unpacked/metadata.jsonl 中写一行 {{\"file_name\": IMAGE, \"text\": TEXT}}，再用 --data unpacked"
        ));
    }
    if begins(&[
        b"\x89PNG",
        b"\xff\xd8\xff",
        b"GIF8",
        b"RIFF",
        b"II*\0",
        b"MM\0*",
    ]) {
        return Some(
            both(
                "the file is an image: give --data a file whose samples name images, or a directory",
                "该文件是图片：请用 --data 指定样本中写明图片的文件，或一个目录",
            )
            .into(),
        );
    }
    if ending == "safetensors" {
        return Some(
            both(
                "the file holds weights: give its directory as --model, and samples as --data",
                "该文件存放权重：请用 --model 指定其目录，用 --data 指定样本",
            )
            .into(),
        );
    }
    if ending == "tsv" {
        return Some(
            both(
                "columns are separated by tabs: store the table with commas, under a name that ends in .csv",
                "各列以制表符分隔：请改用逗号保存，文件名以 .csv 结尾",
            )
            .into(),
        );
    }
    std::str::from_utf8(&bytes).is_err().then(|| {
        text!(
            "the text is not UTF-8: iconv -f GB18030 -t UTF-8 {file} > utf8.json (or -f LATIN1, as it was written), then give --data utf8.json",
            "文本不是 UTF-8 编码：请运行 iconv -f GB18030 -t UTF-8 {file} > utf8.json（或按其编码改用 -f LATIN1 等），再用 --data utf8.json"
        )
    })
}

/// What JSON demands, if the parser stopped at `line` of the file at something that other languages allow, or within an
/// entry.
fn syntax_hint(path: &Path, line: usize, reason: &str) -> Option<Both> {
    let begins = |words: &[&str]| words.iter().any(|word| reason.starts_with(word));
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let found = text.lines().nth(line.saturating_sub(1)).unwrap_or_default();
    let is_value = begins(&["expected value"]);
    if is_value && ["NaN", "Infinity"].iter().any(|word| found.contains(word)) {
        return Some(both(
            "JSON has no NaN and no Infinity: write null, or remove the key",
            "JSON 没有 NaN 和 Infinity：请写 null，或删除该键",
        ));
    }
    if is_value || begins(&["trailing comma", "key must be a string"]) {
        return Some(both(
            "JSON writes texts in double quotes, has no comments, and no comma after the last entry",
            "JSON 的文本要用双引号，没有注释，最后一项之后没有逗号",
        ));
    }
    if begins(&["trailing characters"]) && found.trim_end().ends_with(',') {
        return Some(both(
            "remove the comma at the end of each line, or put [ before the first sample and ] after the last, which has no comma",
            "请去掉每行末尾的逗号；或在第一个样本前加 [，在最后一个样本后加 ]（其后没有逗号）",
        ));
    }
    begins(&["EOF while parsing", "trailing characters"]).then_some(both(
        "samples are a JSON list, or one object on each line",
        "样本应是一个 JSON 列表，或每行一个对象",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next lines of the refusal of a file `name` with `content`.
    fn next(name: &str, content: &[u8]) -> String {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(name);
        std::fs::write(&path, content).expect("written");
        let error = models::data::read_datasets(&path, None, None).expect_err(name);
        refusal(&path, None, &error).to_string()
    }

    #[test]
    fn each_kind_of_file_has_its_next_line() {
        let mut tar = vec![b'x'; 600];
        tar[TAR_MARK].copy_from_slice(b"ustar");
        for (name, content, part) in [
            ("a.json", &b"\xff\xfe[\0{\0}\0]\0"[..], "iconv -f UTF-16"),
            ("a.jsonl", b"{\"query\": \"caf\xe9\"}", "iconv -f GB18030"),
            ("a.csv", b"query,response\nq,\xc4\xe3\n", "iconv -f GB18030"),
            ("a.tsv", b"query\tresponse\nq\ta\n", ".csv"),
            ("a.png", b"\x89PNG\r\n", "is an image"),
            ("a.safetensors", b"\x10\0\0\0\0\0\0\0{}", "--model"),
            ("a.tar", &tar, "tar -xf"),
            ("a.json.gz", b"\x1f\x8b\x08", "zcat "),
            ("a.jsonl", b"{\"query\": NaN}", "no NaN"),
            ("a.json", b"[{'query': 'q'}]", "double quotes"),
            (
                "a.jsonl",
                b"{\"query\": \"q\"},\n{\"query\": \"r\"},\n",
                "remove the comma",
            ),
            (
                "a.jsonl",
                b"[{\"query\": \"q\", \"answer\": \"a\"}]\n[]\n",
                "one object on each line",
            ),
        ] {
            let failure = next(name, content);
            assert!(failure.contains(part), "{name}: {failure}");
            assert!(!failure.contains("captcha"), "{name}: {failure}");
        }
    }

    #[test]
    fn a_refused_row_of_parquet_is_not_a_matter_of_encoding() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.parquet");
        std::fs::write(&path, b"PAR1\xff\xfe").expect("written");
        assert_eq!(of_another_kind(&path), None);
    }

    #[test]
    fn another_form_is_named_only_where_it_helps() {
        for (content, part) in [
            (r#"{"query": "q", "response": true}"#, "change or remove"),
            (
                r#"{"query": "q", "response": "a", "image": "https://x.y/a.png"}"#,
                "change or remove",
            ),
            (
                r#"{"query": "q", "response": "a", "image": "a", "img": "b"}"#,
                "change or remove",
            ),
            (
                r#"{"messages": [{"role": "user", "content": null}]}"#,
                "change or remove",
            ),
            (r#"{"messages": "[{'role': 'user'}]"}"#, "change or remove"),
            (
                "{\"query\": \"q\", \"response\": \"a\"}\n{\"messages\": []}",
                "query-response: {query",
            ),
        ] {
            let failure = next("a.jsonl", content.as_bytes());
            assert!(failure.contains(part), "{content}: {failure}");
        }
    }

    #[test]
    fn names_of_the_hub_are_downloaded_first() {
        for (data, part) in [
            (
                "AI-ModelScope/LaTeX_OCR#2000",
                "hf download AI-ModelScope/LaTeX_OCR --repo-type dataset",
            ),
            (
                "data/dataset_info.json#AI-ModelScope/LaTeX_OCR#2000",
                "modelscope download --dataset AI-",
            ),
            ("hf://a/b", "hf download a/b"),
            ("https:/x.y/z.json", "curl -LO https://x.y/z.json"),
            ("no.json,AI-ModelScope/LaTeX_OCR", "hf download AI-"),
        ] {
            let next = remote(Path::new(data)).unwrap_or_default();
            assert!(next.contains(part), "{data}: {next}");
        }
        assert_eq!(remote(Path::new("no.json")), None);
        assert_eq!(remote(Path::new("src/no.json")), None);
    }
}
