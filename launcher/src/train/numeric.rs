//! Search for the origin of a non-finite loss or gradient.
//!
//! When an update is skipped, every rank runs one more forward pass and observes each operation. It repeats its first
//! micro-batch with a non-finite loss, or else its first micro-batch, so that all ranks make the same gathers. The
//! ranks exchange their findings and report the same origin.

use super::replica::Replica;
use super::step_context::StepContext;
use crate::config::{PrecisionChoice, RunConfig};
use crate::data::SampleSet;
use crate::data::check::encode_options;
use crate::error::{ErrorCode, Failure, continue_run, failures, file_name};
use crate::lang::{Text, both, text};
use crate::model::not_finite::first_not_finite;
use crate::report::{checkpoints, run_directory};
use engine::comm::Tag;
use engine::{PassKind, StepReport};
use models::autograd::{OpObserver, Tape};
use models::{SampleInput, pipeline};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::PathBuf;

/// Number of steps whose losses and norms a report shows.
const REMEMBERED_STEPS: usize = 5;

/// Losses and gradient norms of the last steps, oldest first, and the origin of the current series of skipped
/// updates.
#[derive(Debug, Default)]
pub(crate) struct History {
    recent: VecDeque<(f64, f64)>,
    finding: Option<Finding>,
}

/// First skipped update of a series, and where its first non-finite value came from.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    step: u64,
    loss: f64,
    recent: Vec<(f64, f64)>,
    origin: Origin,
    file: Option<PathBuf>,
}

/// Origin of the first non-finite value, equal on all ranks.
#[derive(Clone, Debug, PartialEq)]
struct Origin {
    rank: usize,
    micro_batch: Option<u64>,
    value: Text,
    ids: Vec<String>,
}

/// Findings that one rank sends to the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Message {
    micro_batches: Vec<MicroBatch>,
    /// First operation of the repeated pass with a non-finite result.
    operation: Option<Text>,
    /// Unit nearest to the loss with non-finite gradients on this rank: index and name.
    gradient: Option<(usize, String)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct MicroBatch {
    micro_batch: u64,
    loss_is_finite: bool,
    samples: Vec<Sample>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Sample {
    index: usize,
    id: Option<String>,
    tokens: usize,
    images: Vec<PathBuf>,
}

/// Samples and losses of this rank in the current step.
pub(crate) struct StepSamples<'a> {
    pub(crate) replica: &'a Replica<'a>,
    pub(crate) train: &'a SampleSet,
    /// The step's micro-batches with the sum of token losses of each.
    pub(crate) losses: &'a [(StepContext, f64)],
}

impl History {
    /// Records a step. An applied update ends a series of skipped ones.
    pub(crate) fn push(&mut self, step: &StepReport) {
        if self.recent.len() == REMEMBERED_STEPS {
            self.recent.pop_front();
        }
        self.recent.push_back((step.loss, step.grad_norm));
        if step.applied {
            self.finding = None;
        }
    }

    /// Origin of the current series of skipped updates. The first call of a series searches for it. All ranks call
    /// this in the same steps.
    ///
    /// # Errors
    /// The forward pass or the exchange fails.
    pub(crate) fn investigate(
        &mut self,
        made_of: &StepSamples<'_>,
        done: u64,
        step: &StepReport,
    ) -> Result<&Finding, Failure> {
        let finding = match self.finding.take() {
            Some(known) => known,
            None => {
                let (origin, messages) = exchange(made_of)?;
                Finding {
                    step: done,
                    loss: step.loss,
                    recent: self.recent.iter().copied().collect(),
                    file: save_batch(made_of.replica, done, &messages),
                    origin,
                }
            }
        };
        Ok(self.finding.insert(finding))
    }
}

/// Exchanges the findings of all ranks, and derives the origin from them.
fn exchange(made_of: &StepSamples<'_>) -> Result<(Origin, Vec<Message>), Failure> {
    let operation = replay(made_of)?;
    let replica = made_of.replica;
    let units = &replica.zero.plan().spec().units;
    let gradient = replica.zero.non_finite_gradient().map(|name| {
        let index = units.iter().position(|unit| unit.name == name);
        (index.unwrap_or(0), name.to_owned())
    });
    let own = Message {
        micro_batches: made_of
            .losses
            .iter()
            .map(|(place, loss)| micro_batch(made_of.train, place, *loss))
            .collect(),
        operation,
        gradient,
    };
    let bytes = serde_json::to_vec(&own).unwrap_or_default();
    let all = replica
        .comm
        .all_gather_bytes(&bytes, Tag::new("non-finite", 0))
        .map_err(|e| failures::comm(&e))?;
    let all: Vec<Message> = all
        .iter()
        .filter_map(|bytes| serde_json::from_slice(bytes).ok())
        .collect();
    let stages = replica.zero.mesh().coordinates().stages;
    Ok((origin(&all, stages), all))
}

fn micro_batch(train: &SampleSet, place: &StepContext, loss: f64) -> MicroBatch {
    let samples = place.samples.iter().zip(&place.tokens);
    MicroBatch {
        micro_batch: place.micro_batch,
        loss_is_finite: loss.is_finite(),
        samples: samples
            .map(|(index, tokens)| {
                let raw = train.samples.get(*index);
                Sample {
                    index: train.index_in_file(*index),
                    id: raw.and_then(|raw| raw.id.clone()),
                    tokens: *tokens,
                    images: raw.map_or_else(Vec::new, |raw| {
                        raw.images.iter().map(|(_, path)| path.clone()).collect()
                    }),
                }
            })
            .collect(),
    }
}

/// Origin by all findings: the earliest non-finite loss over micro-batches and ranks. Of the `stages` pipeline stages of a
/// data-parallel rank, it is the first that found a value. If all losses are finite, the
/// non-finite gradient nearest to the loss.
fn origin(all: &[Message], stages: usize) -> Origin {
    let losses = all.iter().enumerate().flat_map(|(rank, message)| {
        let bad = message.micro_batches.iter().find(|m| !m.loss_is_finite);
        bad.map(|bad| (bad.micro_batch, rank, message, bad))
    });
    if let Some((micro, rank, message, bad)) = losses.min_by_key(|(micro, rank, message, _)| {
        (*micro, *rank / stages, message.operation.is_none(), *rank)
    }) {
        return Origin {
            rank,
            micro_batch: Some(micro),
            value: message.operation.clone().unwrap_or_else(|| {
                both("the loss itself: all values before it were finite in the repeated forward pass", "损失本身：在重复的前向传播中，它之前的所有值都是有限的").into()
            }),
            ids: names(&bad.samples),
        };
    }
    let gradients = all.iter().enumerate().flat_map(|(rank, message)| {
        let gradient = message.gradient.as_ref();
        gradient.map(|(index, name)| (*index, rank, name, message))
    });
    match gradients.max_by_key(|(index, rank, ..)| (*index, usize::MAX - rank)) {
        Some((_, rank, name, message)) => Origin {
            rank,
            micro_batch: None,
            value: text!(
                "a gradient of {name}; the values of the forward pass are finite, so the overflow is in backward",
                "{name} 的梯度；前向传播的值都是有限的，因此溢出发生在反向传播中"
            ),
            ids: names(message.micro_batches.iter().flat_map(|m| &m.samples)),
        },
        None => Origin {
            rank: 0,
            micro_batch: None,
            value: both(
                "the sum of all losses or gradients; each of them is finite",
                "所有损失或梯度之和；其中每一项都是有限的",
            )
            .into(),
            ids: Vec::new(),
        },
    }
}

fn names<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> Vec<String> {
    let name = |s: &Sample| s.id.clone().unwrap_or_else(|| format!("#{}", s.index));
    samples.into_iter().map(name).collect()
}

/// Repeats a forward pass. Returns a description of the first operation with a non-finite result.
fn replay(made_of: &StepSamples<'_>) -> Result<Option<Text>, Failure> {
    let (replica, train) = (made_of.replica, made_of.train);
    let first_bad = made_of.losses.iter().find(|(_, l)| !l.is_finite());
    let place = first_bad.or(made_of.losses.first()).map(|(p, _)| p);
    let options = encode_options(replica.config);
    let samples: Vec<_> = place
        .into_iter()
        .flat_map(|place| &place.samples)
        .filter_map(|index| train.samples.get(*index))
        .filter_map(|raw| replica.processor.encode(raw, &train.images, &options).ok())
        .collect();
    replica.zero.begin_pass(PassKind::Infer);
    let inputs: Vec<SampleInput<'_>> = samples.iter().map(SampleInput::from).collect();
    let found = match inputs.is_empty() {
        true => None,
        false => observe(replica, &inputs)?,
    };
    replica.zero.end_pass().map_err(|e| {
        failures::engine(
            both("look for the first non-finite value", "查找第一个非有限值"),
            &e,
        )
    })?;
    Ok(found)
}

/// Runs `inputs` through the model. Returns a description of the first operation with a non-finite result.
pub(crate) fn observe(
    replica: &Replica<'_>,
    inputs: &[SampleInput<'_>],
) -> Result<Option<Text>, Failure> {
    let unit = || Some(replica.zero.position()?.0.to_owned());
    let pass = |observer: OpObserver<'_>| {
        let batch = replica.model.collate(inputs, &*replica.backend)?;
        let tape = Tape::inference(&replica.zero)
            .with_op_observer(observer)
            .with_received(pipeline::receive(&replica.zero)?);
        replica.model.forward(&tape, &batch)?;
        pipeline::send(&replica.zero, &tape)
    };
    first_not_finite(replica.model.spec(), &unit, &pass).map_err(|e| {
        failures::model(
            both("look for the first non-finite value", "查找第一个非有限值"),
            &e,
        )
    })
}

/// Writes the step's samples to a file on rank 0. Returns its path relative to the run's directory.
fn save_batch(replica: &Replica<'_>, step: u64, messages: &[Message]) -> Option<PathBuf> {
    let name = format!("{}/batch-{step}.json", run_directory::ERRORS);
    if replica.comm.world().rank == 0 {
        let path = replica.config.output.join(&name);
        let ranks: Vec<_> = messages
            .iter()
            .enumerate()
            .map(|(rank, message)| serde_json::json!({"rank": rank, "found": stored(message)}))
            .collect();
        let data = replica.config.data_file();
        let content = serde_json::json!({"step": step, "data": data, "ranks": ranks});
        let directory = replica.config.output.join(run_directory::ERRORS);
        let written = std::fs::create_dir_all(directory)
            .and_then(|()| std::fs::write(&path, format!("{content:#}\n")));
        if let Err(error) = written {
            // A failed write is only a warning, because the run has its own outcome.
            tracing::warn!("{} cannot be written: {error}", path.display());
        }
    }
    Some(PathBuf::from(name))
}

/// A message as a file has it: in English.
fn stored(message: &Message) -> serde_json::Value {
    let mut value = serde_json::json!(message);
    value["operation"] = message.operation.as_deref().into();
    value
}

impl Finding {
    /// Text about the origin for the warning of a skipped update.
    pub(crate) fn hint(&self) -> Text {
        let Origin {
            rank,
            micro_batch,
            value,
            ..
        } = &self.origin;
        let micro =
            micro_batch.map_or_else(Text::default, |m| text!(", micro-batch {m}", "，微批 {m}"));
        text!(
            "first non-finite value (rank {rank}{micro}): {value}",
            "第一个非有限值（rank {rank}{micro}）：{value}"
        )
    }

    /// Failure that ends the run after `skipped` skipped updates in a row.
    pub(crate) fn failure(&self, config: &RunConfig, skipped: u32) -> Failure {
        let Origin {
            rank,
            micro_batch,
            value,
            ids,
        } = &self.origin;
        let what = if self.loss.is_finite() {
            both("a gradient is not finite", "梯度不是有限值").into()
        } else {
            text!("loss is {}", "损失为 {}", self.loss)
        };
        let place = match micro_batch {
            Some(micro_batch) => text!(
                "micro-batch {micro_batch}, rank {rank}",
                "微批 {micro_batch}，rank {rank}"
            ),
            None => text!("rank {rank}", "rank {rank}"),
        };
        let losses: Vec<String> = self.recent.iter().map(|(l, _)| format!("{l:.4}")).collect();
        let norms: Vec<String> = self.recent.iter().map(|(_, n)| format!("{n:.3}")).collect();
        let mut failure = Failure::new(
            ErrorCode::Numeric,
            text!(
                "{what} at step {} ({place})",
                "第 {} 步{what}（{place}）",
                self.step
            ),
            text!("first non-finite value: {value}", "第一个非有限值：{value}"),
        )
        .evidence(text!(
            "losses of the last {} steps {}",
            "最近 {} 步的损失：{}",
            losses.len(),
            losses.join(" ")
        ))
        .evidence(text!("gradient norm {}", "梯度范数 {}", norms.join(" ")));
        if !ids.is_empty() {
            let shown = ids.iter().take(8).cloned().collect::<Vec<_>>().join(" ");
            let more = ids.len().saturating_sub(8);
            let more = if more > 0 {
                text!(" and {more} more", "，另有 {more} 个")
            } else {
                Text::default()
            };
            failure = failure.evidence(text!("sample ids {shown}{more}", "样本 id：{shown}{more}"));
        }
        if let Some(file) = &self.file {
            failure = failure.evidence(text!(
                "batch saved in {}",
                "该批次保存在 {}",
                file.display()
            ));
        }
        failure = failure.evidence(text!(
            "{skipped} updates in a row were not finite; none was applied",
            "连续 {skipped} 次更新出现非有限值；都没有应用"
        ));
        self.next_steps(failure, config)
    }

    fn next_steps(&self, mut failure: Failure, config: &RunConfig) -> Failure {
        let rate = config.optimizer.learning_rate;
        let mut change = text!(
            "lower --learning-rate (now {rate:e})",
            "降低 --learning-rate（当前为 {rate:e}）"
        );
        if config.optimizer.max_grad_norm.is_none() {
            change += both(
                ", or set --max-grad-norm 1 (now off)",
                "，或设置 --max-grad-norm 1（当前关闭）",
            );
        }
        if config.precision != PrecisionChoice::F32 {
            change += both(", or try --precision f32", "，或尝试 --precision f32");
        }
        failure = failure.next(change);
        // Step N + 1 is the first to use the weights of checkpoint N. So N is good only if step N + 1 was finite.
        let good = checkpoints::of_run(&config.output)
            .into_iter()
            .rfind(|(step, _)| step + 1 < self.step);
        failure.next(match good {
            Some((_, path)) => text!(
                "{} --learning-rate {:e}   # {} is good",
                "{} --learning-rate {:e}   # {} 完好",
                continue_run(&path),
                rate / 10.0,
                file_name(&path)
            ),
            None => both(
                "no checkpoint was saved before: start again; --save-steps with a smaller number saves earlier",
                "此前没有保存过检查点：请重新开始；更小的 --save-steps 会更早保存",
            )
            .into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(finite: &[bool], operation: Option<&str>, gradient: Option<usize>) -> Message {
        let sample = |index| Sample {
            index,
            id: (index > 0).then(|| format!("s{index}")),
            tokens: 1,
            images: Vec::new(),
        };
        Message {
            micro_batches: finite
                .iter()
                .enumerate()
                .map(|(i, finite)| MicroBatch {
                    micro_batch: i as u64 + 1,
                    loss_is_finite: *finite,
                    samples: vec![sample(i)],
                })
                .collect(),
            operation: operation.map(Text::from),
            gradient: gradient.map(|index| (index, format!("unit {index}"))),
        }
    }

    #[test]
    fn the_earliest_bad_loss_explains_the_step() {
        let all = [
            message(&[true, false], Some("late"), Some(3)),
            message(&[false, false], Some("early"), None),
            message(&[true, true], None, Some(9)),
        ];
        let origin = origin(&all, 1);
        assert_eq!((origin.rank, origin.micro_batch), (1, Some(1)));
        assert_eq!(
            (&*origin.value, origin.ids),
            ("early", vec!["#0".to_owned()])
        );
    }

    #[test]
    fn finite_losses_leave_the_gradient_nearest_to_the_loss() {
        let all = [
            message(&[true], None, Some(3)),
            message(&[true], None, Some(7)),
            message(&[true], None, Some(7)),
        ];
        let origin = origin(&all, 1);
        assert_eq!((origin.rank, origin.micro_batch), (1, None));
        assert!(origin.value.starts_with("a gradient of unit 7"));
    }

    #[test]
    fn history_keeps_the_last_five_steps() {
        let mut history = History::default();
        for loss in 0..8 {
            history.push(&StepReport {
                step: 1,
                loss: f64::from(loss),
                supervised_tokens: 1,
                grad_norm: 1.0,
                applied: true,
            });
        }
        let losses: Vec<f64> = history.recent.iter().map(|(loss, _)| *loss).collect();
        assert_eq!(losses, [3.0, 4.0, 5.0, 6.0, 7.0]);
    }
}
