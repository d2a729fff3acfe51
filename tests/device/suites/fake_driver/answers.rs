//! Answers and evaluations on GPUs.

use device_tests::tolerance;
use kernels::DType;
use serde_json::Value;

use crate::site::{Site, says};

/// Answers and losses of a model with random weights are those of the CPU, whatever holds its weights. What does not
/// fit is refused before a weight is read.
pub(crate) fn answers_agree_with_the_cpu() {
    let site = Site::with_model();
    let json_of = |line: &str| -> Value {
        let (code, text) = site.run(&[], line);
        assert_eq!(code, Some(0), "{line}\n{text}");
        assert!(!text.contains("fake driver: "), "{text}");
        let end = text.find("\n}").unwrap() + 2;
        serde_json::from_str(&text[..end]).unwrap()
    };
    let model = "--model model --precision f32";
    let draw =
        format!("generate {model} --prompt Why? --max-new-tokens 4 --temperature 1.5 --json");
    let evaluate = format!("eval {model} --data held_out.json --max-new-tokens 2");
    let cpu = json_of(&format!("{draw} --device cpu"));
    let loss_of = |result: &Value| result["eval_loss"].as_f64().unwrap();
    let loss = loss_of(&json_of(&format!("{evaluate} --device cpu")));
    for more in [
        "",
        "--offload cpu",
        "--offload nvme:spill",
        "--nproc 2",
        "--nproc 2 --offload cpu",
    ] {
        let gpu = json_of(&format!("{draw} --device cuda {more}"));
        for field in ["answer", "tokens"] {
            assert_eq!(gpu[field], cpu[field], "{more}");
        }
    }
    for more in ["", "--nproc 2"] {
        let result = json_of(&format!("{evaluate} --device cuda {more}"));
        let got = loss_of(&result);
        let allowed = tolerance::trajectory(DType::F32, loss, 0);
        assert!((got - loss).abs() <= allowed, "{got} instead of {loss}");
        assert_eq!(result["eval_samples"], 2);
    }
    let small = [("TESSERA_FAKE_MEMORY", "8388608")];
    let (code, text) = site.run(&small, &format!("{draw} --device cuda"));
    assert_eq!(code, Some(5), "{text}");
    says(&text, &["no weight was read", "--offload cpu"]);
    // The operations of an answer are compared before.
    let (code, text) = site.run(&[], &format!("{draw} --device cuda --verify-gpu auto"));
    assert_eq!(code, Some(0), "{text}");
    says(&text, &["a tiny model on 1 GPUs agree"]);
    // A refused handle is met before a token, and the ranks start again.
    let refused = [("TESSERA_FAKE_NO_IPC", "1")];
    let (code, text) = site.run(&refused, &format!("{draw} --device cuda --nproc 2"));
    assert_eq!(code, Some(0), "{text}");
    says(&text, &["ranks exchange through host memory"]);
}
