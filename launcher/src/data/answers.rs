//! Questions of held-out samples, the generated answers, and the files that store the first of them at each
//! evaluation.

use crate::error::failures::comm as comm_failure;
use crate::error::{ErrorCode, Failure, chain};
use crate::lang::{both, text};
use engine::comm::{Communicator, Tag};
use models::Processor;
use models::SampleInput;
use models::data::{EncodeOptions, EncodedPrompt, PlaceholderStyle, RawSample, SampleError};
use models::generate::Prompt;
use models::image::{ImageFolder, short_path};
use models::text::literal::shown;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Tokens that a generated answer may exceed the reference answer by.
const EXTRA_ANSWER_TOKENS: usize = 8;
/// Directory of the answer files inside a run's directory.
const SAMPLES: &str = "samples";

/// Held-out sample with its prompt, reference answer and generated answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Index among the usable samples of the data file.
    pub(crate) index: usize,
    /// The sample's own id in the data file.
    pub(crate) id: Option<String>,
    /// Absolute paths of the sample's images.
    pub(crate) images: Vec<PathBuf>,
    /// Text of the conversation before the answer.
    pub(crate) prompt: String,
    /// Answer in the data file, without white space at its ends.
    pub(crate) reference: String,
    /// Answer that the model generated; empty before generation.
    pub(crate) answer: String,
    /// Whether the generated answer equals the reference after trimming white space.
    pub(crate) exact: bool,
}

/// Held-out sample, encoded as a prompt.
#[derive(Debug)]
pub(crate) struct Question {
    encoded: EncodedPrompt,
    max_new_tokens: usize,
    unanswered: Answer,
}

impl Question {
    /// Encodes sample `index` of a file as a prompt, with images as in training. The answer may be
    /// [`EXTRA_ANSWER_TOKENS`] longer than the reference.
    pub(crate) fn new(
        processor: &dyn Processor,
        sample: &RawSample,
        images: &ImageFolder,
        index: usize,
        options: &EncodeOptions,
    ) -> Result<Self, Failure> {
        let reference = shown(sample.answer().unwrap_or_default());
        let reference = reference.trim().to_owned();
        let tokens = processor.tokenizer().encode(&reference);
        let tokens = tokens.map_err(|e| sample_failure(index, &SampleError::from(e)))?;
        let encoded = processor
            .encode_prompt(sample, images, options, PlaceholderStyle::Training)
            .map_err(|e| sample_failure(index, &e))?;
        let place = |(_, path): &(String, PathBuf)| {
            let short = short_path(path);
            if short != *path {
                return short;
            }
            let found = images.resolve(path).unwrap_or_else(|_| path.clone());
            std::path::absolute(&found).unwrap_or(found)
        };
        Ok(Self {
            encoded,
            max_new_tokens: tokens.len() + EXTRA_ANSWER_TOKENS,
            unanswered: Answer {
                index,
                id: sample.id.clone(),
                images: sample.images.iter().map(place).collect(),
                prompt: asked(sample),
                reference,
                answer: String::new(),
                exact: false,
            },
        })
    }

    /// Replaces the maximum number of answer tokens, if one is given.
    pub(crate) fn with_limit(self, max_new_tokens: Option<usize>) -> Self {
        Self {
            max_new_tokens: max_new_tokens.unwrap_or(self.max_new_tokens),
            ..self
        }
    }

    pub(crate) fn prompt(&self) -> Prompt<'_> {
        Prompt {
            input: SampleInput::from(&self.encoded),
            index: self.unanswered.index as u64,
            max_new_tokens: self.max_new_tokens,
        }
    }

    /// Decodes an answer's tokens and compares the text with the reference.
    pub(crate) fn judge(
        &self,
        processor: &dyn Processor,
        tokens: &[i32],
    ) -> Result<Answer, Failure> {
        let text = processor
            .decode(tokens)
            .map_err(|e| sample_failure(self.unanswered.index, &SampleError::from(e)))?;
        let text = text.trim();
        Ok(Answer {
            exact: text == self.unanswered.reference,
            answer: text.to_owned(),
            ..self.unanswered.clone()
        })
    }
}

/// Text of the turns before the answer. If there are several turns, each starts with its role.
fn asked(sample: &RawSample) -> String {
    let answered = usize::from(sample.answer().is_some());
    let turns = &sample.conversations[..sample.conversations.len() - answered];
    match turns {
        [only] => shown(&only.content).into_owned(),
        several => {
            let line = several
                .iter()
                .map(|t| format!("{}: {}", t.role, shown(&t.content)));
            line.collect::<Vec<_>>().join("\n")
        }
    }
}

pub(crate) fn sample_failure(index: usize, error: &SampleError) -> Failure {
    Failure::new(
        ErrorCode::DataFile,
        text!(
            "held-out sample {index} cannot be used",
            "留出样本 {index} 无法使用"
        ),
        chain(error),
    )
}

/// Gathers the answers of all ranks. Rank 0 writes them, in sample order, to `samples/step-NNNNNN.json` in the run's
/// directory `output`. All ranks take part.
///
/// # Errors
/// The exchange fails or the file cannot be written.
pub(crate) fn keep(
    comm: &dyn Communicator,
    output: &Path,
    step: u64,
    own: &[Answer],
) -> Result<(), Failure> {
    let directory = output.join(SAMPLES);
    let unreadable = |error: serde_json::Error| {
        Failure::io(
            ErrorCode::Disk,
            both("write", "写入"),
            &directory,
            &error.into(),
        )
    };
    let message = serde_json::to_vec(own).map_err(unreadable)?;
    let all = comm
        .all_gather_bytes(&message, Tag::new("eval-answers", 0))
        .map_err(|e| comm_failure(&e))?;
    if comm.world().rank != 0 {
        return Ok(());
    }
    let mut answers: Vec<Answer> = Vec::new();
    for part in &all {
        answers.extend(serde_json::from_slice::<Vec<Answer>>(part).map_err(unreadable)?);
    }
    answers.sort_by_key(|answer| answer.index);
    let path = directory.join(format!("step-{step:06}.json"));
    let text = serde_json::to_vec_pretty(&answers).map_err(unreadable)?;
    std::fs::create_dir_all(&directory)
        .and_then(|()| std::fs::write(&path, text))
        .map_err(|error| Failure::io(ErrorCode::Disk, both("write", "写入"), &path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::comm::threads;

    fn answer(index: usize) -> Answer {
        Answer {
            index,
            id: (index > 0).then(|| index.to_string()),
            images: vec!["a.png".into()],
            prompt: "<image>\nWhich?".to_owned(),
            reference: "red".to_owned(),
            answer: "blue".to_owned(),
            exact: false,
        }
    }

    #[test]
    fn answers_of_all_ranks_are_merged_into_one_ordered_file() {
        let directory = tempfile::tempdir().expect("temp dir");
        let world = threads::world(2, 1 << 20).expect("a world");
        std::thread::scope(|scope| {
            for comm in world {
                let output = directory.path();
                scope.spawn(move || {
                    let own = match comm.world().rank {
                        0 => vec![answer(0), answer(2)],
                        _ => vec![answer(1)],
                    };
                    keep(&*comm, output, 200, &own).expect("kept");
                });
            }
        });
        let text = std::fs::read_to_string(directory.path().join("samples/step-000200.json"));
        let rows: serde_json::Value = serde_json::from_str(&text.expect("read")).expect("JSON");
        let first = serde_json::json!({
            "index": 0, "id": null, "images": ["a.png"], "prompt": "<image>\nWhich?",
            "reference": "red", "answer": "blue", "exact": false,
        });
        assert_eq!(rows[0], first);
        let order: Vec<_> = (0..3).map(|i| rows[i]["index"].as_u64()).collect();
        assert_eq!(order, [Some(0), Some(1), Some(2)]);
    }

    #[test]
    fn the_question_is_the_text_before_the_last_answer() {
        let sample = |turns: &[(&str, &str)]| -> RawSample {
            let turns: Vec<_> = turns
                .iter()
                .map(|(role, content)| serde_json::json!({"role": role, "content": content}))
                .collect();
            serde_json::from_value(serde_json::json!({ "conversations": turns })).expect("a sample")
        };
        assert_eq!(asked(&sample(&[("user", "a"), ("assistant", "b")])), "a");
        let long = [
            ("user", "a"),
            ("assistant", "b"),
            ("user", "c"),
            ("assistant", "d"),
        ];
        assert_eq!(asked(&sample(&long)), "user: a\nassistant: b\nuser: c");
    }
}
