//! Keys of published trainers: none may be unknown.

use super::{Trainer, find, keys::PEFT, meaning};
use crate::cli::{FileKey, file_key};

/// Lines of keys after the name of their trainer.
const KEYS: &str = include_str!("published.txt");

#[test]
fn no_key_of_a_published_trainer_is_unknown() {
    let mut unknown = Vec::new();
    let mut known = 0;
    let lines = KEYS
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    for line in lines {
        let mut words = line.split(' ');
        let trainer = words.next().and_then(Trainer::named);
        assert!(trainer.is_some() || line.starts_with("peft "), "{line}");
        for key in words {
            // A key is understood in its trainer's recipe and beside flags of this program.
            let is_known = |trainer| {
                meaning(trainer, key).is_some() || !matches!(file_key(key), FileKey::Unknown(_))
            };
            let found = match trainer {
                None => find(PEFT, key).is_some(),
                Some(_) => is_known(trainer) && is_known(None),
            };
            known += usize::from(found);
            unknown.extend((!found).then_some(key));
        }
    }
    assert!(unknown.is_empty(), "{unknown:?}");
    assert!(known > 800, "{known}");
}
