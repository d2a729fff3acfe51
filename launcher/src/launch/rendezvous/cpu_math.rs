//! Order of sums that all ranks use on CPUs: `--cpu-math`.

use engine::comm::{Communicator, Tag};
use kernels::CpuMath;
use serde_json::Value;

use crate::config::{CpuMathChoice, Device, PrecisionChoice, RunConfig};
use crate::error::Failure;
use crate::error::failures::comm as comm_failure;
use crate::lang::{Text, text};

/// Key of a checkpoint's metadata with the order of sums of its run.
pub(crate) const CPU_MATH: &str = "cpu_math";

/// Order of sums that the ranks agreed on, and the line to print about it, if any.
pub(crate) struct AgreedMath {
    pub(crate) math: CpuMath,
    pub(crate) text: Option<Text>,
}

/// Agrees with all ranks on the order of sums. `native` is the order that this rank's processor computes fastest, `saved` the
/// metadata of the checkpoint that the run continues.
///
/// # Errors
/// Another rank is lost (exit 13).
pub(crate) fn cpu_math(
    config: &RunConfig,
    saved: Option<&Value>,
    native: CpuMath,
    comm: &dyn Communicator,
) -> Result<AgreedMath, Failure> {
    let portable = AgreedMath {
        math: CpuMath::Portable,
        text: None,
    };
    // Other types have one order.
    let in_bf16 = matches!(
        config.precision,
        PrecisionChoice::Bf16 | PrecisionChoice::PureBf16
    );
    if config.device != Device::Cpu || !in_bf16 {
        return Ok(portable);
    }
    // Earlier versions had the portable order and did not save it.
    let before = saved.map(|meta| match meta.get(CPU_MATH).and_then(Value::as_str) {
        Some("amx") => CpuMath::Amx,
        _ => CpuMath::Portable,
    });
    let wish = match (config.cpu_math, before) {
        (Some(CpuMathChoice::Portable), _) => CpuMath::Portable,
        (Some(CpuMathChoice::Amx), _) => CpuMath::Amx,
        (None, Some(before)) => before,
        (None | Some(CpuMathChoice::Native), _) => native,
    };
    let own = [wish, native].map(|math| u8::from(math == CpuMath::Amx));
    let all = comm
        .all_gather_bytes(&own, Tag::new("cpu math", 0))
        .map_err(|error| comm_failure(&error))?;
    let without = |at: usize| all.iter().position(|rank| rank.get(at) != Some(&1));
    let (math, text) = match (without(0), without(1)) {
        (None, None) => (
            CpuMath::Amx,
            Some(text!(
                "AMX multiplies bf16 matrices · --cpu-math portable has the bits of other processors",
                "bf16 矩阵由 AMX 相乘 · --cpu-math portable 的位与其他处理器相同"
            )),
        ),
        (None, Some(rank)) => (
            CpuMath::Amx,
            Some(text!(
                "sums in the order of AMX, which rank {rank} does not have: it computes the same bits in f32 arithmetic, \
                 more slowly than --cpu-math portable",
                "按 AMX 的顺序求和，而 rank {rank} 没有 AMX：它用 f32 运算得到相同的位，比 --cpu-math portable 慢"
            )),
        ),
        (Some(rank), _) if all.iter().any(|rank| rank.first() == Some(&1)) => (
            CpuMath::Portable,
            Some(text!(
                "rank {rank} has no AMX, so no rank uses it: --cpu-math amx",
                "rank {rank} 没有 AMX，因此所有 rank 都不使用它：--cpu-math amx"
            )),
        ),
        _ => (CpuMath::Portable, None),
    };
    let text = match before.filter(|before| *before != math) {
        Some(before) => Some(text!(
            "--cpu-math was {} in the checkpoint's run and is {} now",
            "--cpu-math 在检查点的运行中为 {}，现在为 {}",
            before.name(),
            math.name()
        )),
        None => text,
    };
    Ok(AgreedMath { math, text })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command, resolve_on};
    use crate::device::Chosen;
    use crate::lang::Lang;
    use crate::rank_env::Env;
    use serde_json::json;

    use CpuMath::{Amx, Portable};

    const BF16: &str = "--nproc 2 --precision bf16";

    /// Order and text of two ranks with these processors.
    fn agreed(flags: &str, saved: Option<&str>, natives: [CpuMath; 2]) -> (CpuMath, String) {
        let words: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        let Ok(Command::Train { args, .. }) = cli::parse(&words) else {
            panic!("a training line");
        };
        let env = Env::from_lookup(&|_| None).expect("an environment");
        let config = resolve_on(&args, &env, &Chosen::cpu())
            .expect("resolved")
            .config;
        let meta = saved.map(|name| json!({CPU_MATH: name}));
        let both = crate::launch::rendezvous::tests::on_ranks(2, |comm| {
            let native = natives[comm.world().rank];
            let sums = cpu_math(&config, meta.as_ref(), native, comm).expect("both are here");
            let text = sums.text.map(|text| text.get(Lang::En).to_owned());
            (sums.math, text.unwrap_or_default())
        });
        assert_eq!(both[0], both[1]);
        both[0].clone()
    }

    #[test]
    fn ranks_use_the_order_that_all_their_processors_have() {
        let math = |flags: &str, natives| agreed(&format!("{BF16} {flags}"), None, natives).0;
        assert_eq!(math("", [Amx; 2]), Amx);
        assert_eq!(math("", [Portable; 2]), Portable);
        assert_eq!(math("", [Amx, Portable]), Portable);
        assert_eq!(math("--cpu-math native", [Portable, Amx]), Portable);
        assert_eq!(math("--cpu-math portable", [Amx; 2]), Portable);
        assert_eq!(math("--cpu-math amx", [Amx, Portable]), Amx);
        assert_eq!(
            agreed("--nproc 2 --cpu-math amx --precision f32", None, [Amx; 2]).0,
            Portable
        );
        assert_eq!(
            agreed("--nproc 2 --cpu-math amx --precision fp16", None, [Amx; 2]).0,
            Portable
        );
        assert_eq!(
            agreed("--nproc 2 --precision pure-bf16", None, [Amx; 2]).0,
            Amx
        );
        let (_, text) = agreed(BF16, None, [Amx, Portable]);
        assert!(text.starts_with("rank 1 has no AMX"), "{text}");
    }

    #[test]
    fn a_resumed_run_keeps_its_order_on_other_processors() {
        let agreed =
            |flags: &str, saved, natives| agreed(&format!("{BF16} {flags}"), Some(saved), natives);
        assert_eq!(agreed("", "portable", [Amx; 2]), (Portable, String::new()));
        let (math, text) = agreed("", "amx", [Amx, Portable]);
        assert_eq!(math, Amx);
        assert!(text.contains("rank 1 does not have"), "{text}");
        // Checkpoints of earlier versions do not name it.
        assert_eq!(agreed("", "", [Amx; 2]).0, Portable);
        let (math, text) = agreed("--cpu-math native", "amx", [Portable; 2]);
        assert_eq!(math, Portable);
        assert_eq!(
            text,
            "--cpu-math was amx in the checkpoint's run and is portable now"
        );
    }
}
