//! Pipeline stages: what a run with them cannot do.

use super::{OptimizerInBackward, RunConfig};
use crate::error::Failure;
use crate::lang::{Both, Text, both, text};

impl RunConfig {
    /// Refuses settings that pipeline stages do not support, and a division among another number of stages (exit 2).
    pub(crate) fn check_pipeline(&self) -> Result<(), Failure> {
        if let Some(split) = &self.mp_split {
            let counts: Vec<String> = split.iter().map(u32::to_string).collect();
            let flag = format!("--mp-split {}", counts.join(","));
            if split.len() != self.mp_size || split.contains(&0) {
                let stages = self.mp_size;
                return Err(Failure::usage(
                    text!(
                        "{flag} does not divide the units among --mp-size {stages} stages",
                        "{flag} 无法把单元分给 --mp-size {stages} 个段"
                    ),
                    both(
                        "it needs one number of units, at least 1, for each stage",
                        "每个段都需要一个至少为 1 的单元数",
                    ),
                )
                .next(match split.contains(&0) {
                    true => both(
                        "omit --mp-split, and planning balances the stages",
                        "请去掉 --mp-split，由规划平衡各段",
                    )
                    .into(),
                    false => Text::literal(format_args!("--mp-size {}", split.len())),
                }));
            }
        }
        if self.mp_size == 1 {
            return Ok(());
        }
        match self.not_in_stages() {
            None => Ok(()),
            Some((what, why, next)) => Err(Failure::usage(
                text!(
                    "--mp-size {} is not available with {what}",
                    "--mp-size {} 不能与 {what} 一起使用",
                    self.mp_size
                ),
                why,
            )
            .next(next)),
        }
    }

    /// A setting that does not work with pipeline stages, why, and what to use.
    fn not_in_stages(&self) -> Option<(Text, Both, Both)> {
        let asked = self.optimizer_in_backward;
        let updates = matches!(
            asked,
            OptimizerInBackward::All | OptimizerInBackward::Most(_)
        );
        updates.then(|| {
            (
                Text::literal(format_args!("--optimizer-in-backward {asked}")),
                both(
                    "an update in backward needs the number of tokens of the step, which only the last stage counts",
                    "反向中的更新需要该步的 token 数，而只有最后一段统计它",
                ),
                both(
                    "--optimizer-in-backward off",
                    "请使用 --optimizer-in-backward off",
                ),
            )
        })
    }
}
