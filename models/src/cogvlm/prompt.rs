//! Prompts as text, one rule per template and per code base.
//!
//! Two published code bases write prompts: the code of the checkpoints on the Hub, and the training scripts on
//! SwissArmyTransformer. They differ in templates and in the marker `<EOI>`. The first treats it as plain text; the
//! second puts the image in its place.

use super::config::{Edition, TemplateVersion};
use crate::data::{PromptSource, PromptStyle};

/// Marker of the image's place in the scripts' strings.
const PLACE: &str = "<EOI>";
/// Strings that the scripts delete from a text without a marker of its own.
const DELETED: [&str; 4] = ["<pad>", "<s>", "</s>", PLACE];

/// A question with the earlier rounds of its conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Earlier rounds of the conversation, oldest first, each a question with its answer.
    pub history: Vec<(String, String)>,
    /// The question to answer now.
    pub query: String,
}

impl Turns {
    /// Writes question and history as the prompt text that follows the image, in the template of `style`.
    /// `edition` is needed since some templates have another form for CogAgent.
    #[must_use]
    pub fn render(&self, edition: Edition, style: PromptStyle) -> String {
        use TemplateVersion as V;
        let hub = style.source == PromptSource::Hub;
        let agent = edition == Edition::CogAgent;
        match (style.template, hub) {
            (V::Base, true) => self.query.clone(),
            (V::Base, false) => without(&self.query, &DELETED),
            (V::Chat, true) if !agent => self.questions("Answer:", true),
            (V::Chat, true) => self.instructions(),
            (V::Chat, false) => without(&self.instructions(), &DELETED),
            (V::Vqa, true) if !agent => self.questions("Short answer:", true),
            (V::Vqa, true) => format!("{PLACE}{}", self.questions("Short answer:", false)),
            (V::Vqa, false) => without(&self.questions("Short answer:", false), &[PLACE]),
            (V::ChatOld, true) if agent => format!("{PLACE}{}", self.questions("Answer:", true)),
            (V::ChatOld, true) => self.questions("Answer:", true),
            (V::ChatOld, false) => without(&self.questions("Answer:", true), &[PLACE]),
        }
    }

    /// `Question: .. Answer: ..`, one round per line.
    fn questions(&self, answer: &str, history: bool) -> String {
        let rounds = self.history.iter().filter(|_| history);
        let mut text: String = rounds
            .map(|(q, a)| format!("Question: {q} {answer} {a}\n"))
            .collect();
        text.push_str(&format!("Question: {} {answer}", self.query));
        text
    }

    /// `[INST] .. [/INST] ..` with a blank at both ends.
    fn instructions(&self) -> String {
        let rounds = self.history.iter();
        let rounds: String = rounds
            .map(|(q, a)| format!("{q} [/INST] {a} [INST] "))
            .collect();
        format!(" [INST] {rounds}{} [/INST] ", self.query)
    }
}

fn without(text: &str, words: &[&str]) -> String {
    words
        .iter()
        .fold(text.to_owned(), |text, word| text.replace(word, ""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use TemplateVersion as V;

    fn render(edition: Edition, source: PromptSource, template: V, history: bool) -> String {
        let history = history.then(|| ("a?".to_owned(), "b".to_owned()));
        let turns = Turns {
            history: history.into_iter().collect(),
            query: "c?".into(),
        };
        turns.render(edition, PromptStyle { template, source })
    }

    #[test]
    fn prompts_of_the_hub_are_those_of_the_code_beside_the_checkpoints() {
        let hub = |edition, template| render(edition, PromptSource::Hub, template, true);
        assert_eq!(hub(Edition::CogVlm, V::Base), "c?");
        let chat = "Question: a? Answer: b\nQuestion: c? Answer:";
        assert_eq!(hub(Edition::CogVlm, V::Chat), chat);
        assert_eq!(hub(Edition::CogVlm2, V::Chat), chat);
        let vqa = "Question: a? Short answer: b\nQuestion: c? Short answer:";
        assert_eq!(hub(Edition::CogVlm, V::Vqa), vqa);
        let agent = " [INST] a? [/INST] b [INST] c? [/INST] ";
        assert_eq!(hub(Edition::CogAgent, V::Chat), agent);
        assert_eq!(
            hub(Edition::CogAgent, V::Vqa),
            "<EOI>Question: c? Short answer:"
        );
        assert_eq!(hub(Edition::CogAgent, V::ChatOld), format!("<EOI>{chat}"));
    }

    #[test]
    fn prompts_of_sat_are_those_of_the_training_scripts() {
        let sat = |template, history| render(Edition::CogVlm, PromptSource::Sat, template, history);
        assert_eq!(sat(V::Chat, false), " [INST] c? [/INST] ");
        assert_eq!(sat(V::Vqa, true), "Question: c? Short answer:");
        assert_eq!(
            sat(V::ChatOld, true),
            "Question: a? Answer: b\nQuestion: c? Answer:"
        );
        let turns = Turns {
            history: Vec::new(),
            query: "x<s> <EOI>y</s>".into(),
        };
        let style = PromptStyle {
            template: V::Base,
            source: PromptSource::Sat,
        };
        assert_eq!(turns.render(Edition::CogVlm, style), "x y");
    }
}
