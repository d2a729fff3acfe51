//! Context of a rank's failure: step, micro-batch and samples at the time.

use super::collectives::Collectives;
use super::replica::Replica;
use super::stall;
use crate::data::SampleSet;
use crate::error::{ErrorCode, Failure};
use crate::lang::{Text, text};
use crate::plan::suggestion::AT_STEP;
use crate::units::grouped;
use models::data::EncodedSample;

/// Maximum number of samples named in a report.
const NAMED_SAMPLES: usize = 4;

/// Micro-batch that a rank is working on, for reports of failures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepContext {
    /// Number of the step, counted from 1.
    pub(crate) step: u64,
    /// Number of the micro-batch within the step, counted from 1.
    pub(crate) micro_batch: u64,
    /// Indices of the micro-batch's samples in the sample set.
    pub(crate) samples: Vec<usize>,
    /// Number of tokens of each sample.
    pub(crate) tokens: Vec<usize>,
    /// Number of image patches of each sample.
    pub(crate) patches: Vec<usize>,
}

impl StepContext {
    /// Context of the encoded samples `batch` with the indices `indices`. `step` and `micro_step` count from 0.
    pub(crate) fn new(
        step: u64,
        micro_step: u64,
        indices: Vec<usize>,
        batch: &[EncodedSample],
    ) -> Self {
        Self {
            step: step + 1,
            micro_batch: micro_step + 1,
            samples: indices,
            tokens: batch.iter().map(|s| s.input_ids.len()).collect(),
            patches: batch.iter().map(EncodedSample::patches).collect(),
        }
    }

    /// One line with step, micro-batch, and the samples' ids and sizes.
    fn describe(&self, set: &SampleSet) -> Text {
        let sizes = self.tokens.iter().zip(&self.patches);
        let mut parts: Vec<Text> = self
            .samples
            .iter()
            .zip(sizes)
            .take(NAMED_SAMPLES)
            .map(|(index, (tokens, patches))| {
                let id = set.samples.get(*index).and_then(|s| s.id.as_deref());
                let id = id.map_or_else(String::new, |id| format!(" (id {id})"));
                let index = set.index_in_file(*index);
                let tokens = grouped(*tokens as u64);
                match patches {
                    0 => text!(
                        "sample {index}{id}: {tokens} tokens, no image",
                        "样本 {index}{id}：{tokens} 个 token，没有图片"
                    ),
                    _ => text!(
                        "sample {index}{id}: {tokens} tokens, {} patches",
                        "样本 {index}{id}：{tokens} 个 token，{} 个 patch",
                        grouped(*patches as u64)
                    ),
                }
            })
            .collect();
        if self.samples.len() > NAMED_SAMPLES {
            let total: usize = self.tokens.iter().sum();
            parts.push(text!(
                "{} more, {} tokens in total",
                "另有 {} 个，共 {} 个 token",
                self.samples.len() - NAMED_SAMPLES,
                grouped(total as u64)
            ));
        }
        text!(
            "step {}, micro-batch {}: {}",
            "第 {} 步，微批 {}：{}",
            self.step,
            self.micro_batch,
            Text::join(&parts, "; ")
        )
    }
}

/// State of a rank at the time of a failure.
pub(crate) struct Failing<'a> {
    pub(crate) replica: &'a Replica<'a>,
    /// Micro-batch that the rank was working on, if any.
    pub(crate) place: Option<&'a StepContext>,
    pub(crate) train: &'a SampleSet,
    /// Whether the run has held-out samples.
    pub(crate) evaluates: bool,
    /// Log of this rank's last collectives.
    pub(crate) collectives: &'a Collectives,
}

/// Adds context to a failure of this rank: unit, phase, step and samples. For a broken exchange it adds the last
/// collectives of all ranks.
pub(crate) fn complete(failure: Failure, at: &Failing<'_>) -> Failure {
    let (config, zero, comm) = (at.replica.config, &at.replica.zero, &at.replica.comm);
    let world = comm.world();
    let dead = comm.failure();
    let failure = match (&dead, failure.code) {
        (Some(error), ErrorCode::Collective) => {
            stall::report(error, zero.plan()).unwrap_or(failure)
        }
        _ => failure,
    };
    let mut failure = failure;
    if failure.code == ErrorCode::Collective && world.size > 1 {
        let (plan, output) = (zero.plan(), &config.output);
        match at.collectives.save(plan, output, world.rank) {
            Ok(path) => {
                let line = text!(
                    "its last collectives: {}",
                    "它最近的集合通信：{}",
                    path.display()
                );
                failure = failure.evidence(line);
            }
            // A failed write must not hide the failure itself.
            Err(error) => tracing::warn!("the last collectives cannot be written: {error}"),
        }
    }
    if matches!(
        failure.code,
        ErrorCode::DeviceMemory | ErrorCode::HostMemory
    ) {
        if let Some((unit, phase)) = zero.position() {
            failure.title += text!(" in {} of {unit}", "，位于 {unit} 的 {}", phase.name());
        }
        if let Some(place) = at.place {
            failure.title += text!("{AT_STEP}{}", "，第 {} 步", place.step);
        } else if at.evaluates && config.batch.eval_batch > 1 {
            let batch = config.batch.eval_batch;
            failure.next.insert(
                0,
                text!(
                    "--per-device-eval-batch-size {} (now {batch})",
                    "--per-device-eval-batch-size {}（当前为 {batch}）",
                    batch / 2
                ),
            );
        }
    }
    let wanted = matches!(
        failure.code,
        ErrorCode::DeviceMemory | ErrorCode::HostMemory | ErrorCode::Collective
    );
    if let Some(place) = at.place.filter(|_| wanted) {
        let line = place.describe(at.train);
        failure = failure.evidence(if world.size > 1 {
            text!(
                "rank {} worked on {line}",
                "rank {} 正在处理：{line}",
                world.rank
            )
        } else {
            line
        });
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::losses::ImageLosses;
    use models::data::RawSample;
    use models::image::ImageFolder;

    fn raw(id: &str) -> RawSample {
        let text = format!(r#"{{"id": "{id}", "conversations": []}}"#);
        serde_json::from_str(&text).expect("a sample")
    }

    #[test]
    fn samples_are_named_with_their_sizes_and_many_are_summed_up() {
        // The file's second sample was left out.
        let set = SampleSet {
            samples: ["a", "b", "c", "d", "e", "f"].map(raw).into(),
            kept: vec![0, 2, 3, 4, 5, 6],
            images: ImageFolder::new("."),
            sizes: Vec::new(),
            problems: Vec::new(),
            image_count: 0,
            files: Vec::new(),
            losses: ImageLosses::default(),
            largest_image: None,
        };
        let place = StepContext {
            step: 7,
            micro_batch: 2,
            samples: vec![5, 0],
            tokens: vec![1811, 40],
            patches: vec![1024, 0],
        };
        assert_eq!(
            place.describe(&set),
            "step 7, micro-batch 2: sample 6 (id f): 1 811 tokens, 1 024 patches; sample 0 (id a): 40 tokens, no image"
        );
        let many = StepContext {
            samples: (0..6).collect(),
            tokens: vec![10; 6],
            patches: vec![0; 6],
            ..place
        };
        assert!(many.describe(&set).ends_with("2 more, 60 tokens in total"));
    }
}
