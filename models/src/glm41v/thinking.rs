//! Answers as GLM-4.6V's chat template writes them, with their thoughts.

/// Token with which a question asks for an answer without a thought.
pub(super) const OFF: &str = "/nothink";
const START: &str = "<think>";
const END: &str = "</think>";
/// What the prompt says between the role of the assistant and an answer without a thought.
pub(super) const NO_THOUGHT: &str = "\n<think></think>\n";

/// Text of an answer after its role's token.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The part that the prompt gives.
    pub(super) given: String,
    /// The part that the model says.
    pub(super) said: String,
}

impl Answer {
    /// The answer `content` with the thought `given`, or with one in its text. `past` says whether a question comes after
    /// it; its thought is dropped then, as it is with `enable_thinking` false.
    pub(super) fn new(
        content: &str,
        given: Option<&str>,
        past: bool,
        enable_thinking: Option<bool>,
    ) -> Self {
        let (thought, reply) = match given {
            Some(thought) => (thought, content),
            None => split(content),
        };
        let reply = match trimmed(reply) {
            "" => String::new(),
            reply => format!("\n{reply}"),
        };
        let is_off = enable_thinking == Some(false);
        let thought = if past || is_off { "" } else { trimmed(thought) };
        let block = format!("\n{START}{thought}{END}");
        match (is_off, reply.strip_prefix('\n')) {
            (false, _) => Self {
                given: String::new(),
                said: block + &reply,
            },
            (true, Some(reply)) => Self {
                given: NO_THOUGHT.to_owned(),
                said: reply.to_owned(),
            },
            (true, None) => Self {
                given: block,
                said: String::new(),
            },
        }
    }
}

/// Thought and reply of an answer: what stands before the first end mark, and after the last one.
fn split(content: &str) -> (&str, &str) {
    let Some((before, _)) = content.split_once(END) else {
        return ("", content);
    };
    let reply = content.rsplit_once(END).map_or("", |(_, reply)| reply);
    let thought = before.trim_end_matches('\n');
    let thought = thought.rsplit_once(START).map_or(thought, |(_, own)| own);
    (thought, reply)
}

/// `text` without white space at its ends, by Python's rule.
fn trimmed(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(content: &str, past: bool, switch: Option<bool>) -> [String; 2] {
        let answer = Answer::new(content, None, past, switch);
        [answer.given, answer.said]
    }

    #[test]
    fn thoughts_are_written_behind_the_last_question_only() {
        let content = "lost<think>\nLook.\n</think>\n\n Yes. ";
        assert_eq!(
            said(content, false, None)[1],
            "\n<think>Look.</think>\nYes."
        );
        assert_eq!(said(content, true, None)[1], "\n<think></think>\nYes.");
        let off = said(content, false, Some(false));
        assert_eq!(off, ["\n<think></think>\n", "Yes."]);
    }

    #[test]
    fn answers_without_a_thought_or_a_reply_keep_the_block() {
        assert_eq!(
            said("Yes.", false, Some(true))[1],
            "\n<think></think>\nYes."
        );
        assert_eq!(said(" \n", false, None)[1], "\n<think></think>");
        assert_eq!(said("", false, Some(false)), ["\n<think></think>", ""]);
        assert_eq!(said("a</think>b", false, None)[1], "\n<think>a</think>\nb");
    }
}
