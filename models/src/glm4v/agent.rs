//! Prompts of CogAgent-9B: a task, the steps so far, the platform and the form of the answer, as one text.

use serde::Deserialize;

/// Forms of the answer that the checkpoint knows.
const FORMATS: [&str; 6] = [
    "Action-Operation-Sensitive",
    "Status-Plan-Action-Operation",
    "Status-Plan-Action-Operation-Sensitive",
    "Status-Action-Operation-Sensitive",
    "Status-Action-Operation",
    "Action-Operation",
];
/// Platforms that the checkpoint knows, with their case.
const PLATFORMS: [&str; 3] = ["Mac", "WIN", "Mobile"];

/// Order of the parts of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Task, history, platform, format, as the published client asks.
    #[default]
    Inference,
    /// Task, platform, format, history, as the samples of the fine-tuning guide are written.
    Finetune,
}

/// Parts of a prompt of CogAgent-9B.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentPrompt {
    /// What the user wants.
    pub task: String,
    /// Grounded operation and action of every step so far.
    #[serde(default)]
    pub history: Vec<[String; 2]>,
    /// `Mac`, `WIN` or `Mobile`.
    #[serde(default = "first_platform")]
    pub platform: String,
    /// Form of the answer, such as `Action-Operation-Sensitive`.
    #[serde(default = "first_format")]
    pub format: String,
    /// Order of the parts.
    #[serde(default)]
    pub order: Order,
    /// Whether a line break ends the prompt.
    #[serde(default = "yes")]
    pub newline: bool,
    /// Whether the task goes on after an earlier answer.
    #[serde(default)]
    pub go_on: bool,
}

fn first_platform() -> String {
    PLATFORMS[0].to_owned()
}

fn first_format() -> String {
    FORMATS[0].to_owned()
}

const fn yes() -> bool {
    true
}

impl AgentPrompt {
    /// The text of the user's turn.
    ///
    /// # Errors
    /// Platform or format is not one that the checkpoint knows.
    pub fn query(&self) -> Result<String, String> {
        for (name, value, known) in [
            ("platform", &self.platform, &PLATFORMS[..]),
            ("format", &self.format, &FORMATS[..]),
        ] {
            if !known.contains(&value.as_str()) {
                return Err(format!("{name} {value:?} is none of {}", known.join(", ")));
            }
        }
        let task = match self.go_on {
            true => format!("Task: {}[Continue]\n", self.task),
            false => format!("Task: {}", self.task),
        };
        let steps = self.history.iter().enumerate();
        let steps = steps.map(|(i, [operation, action])| format!("\n{i}. {operation}\t{action}"));
        let history = format!("\nHistory steps: {}", steps.collect::<String>());
        let platform = format!("\n(Platform: {})\n", self.platform);
        let format = format!("(Answer in {} format.)", self.format);
        let end = if self.newline { "\n" } else { "" };
        Ok(match self.order {
            Order::Inference => [&task, &history, &platform, &*format, end].concat(),
            Order::Finetune => [&task, &platform, &format, &*history, end].concat(),
        })
    }
}
