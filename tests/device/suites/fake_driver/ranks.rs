//! Ranks that find each other: on one machine and on several, with the transports between their GPUs.

use std::fs;

use crate::site::{Site, free_port, says};

/// Variables that torchrun gives a rank of two on one machine.
fn torchrun<'a>(rank: &'a str, port: &'a str) -> Vec<(&'a str, &'a str)> {
    vec![
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
    ]
}

/// Runs two ranks that another program started, each with variables of its own. Both must succeed.
fn two_ranks(site: &Site, own: [&[(&str, &str)]; 2], line: &str) -> [String; 2] {
    let port = free_port().to_string();
    let ranks = [0, 1].map(|rank| [&torchrun(["0", "1"][rank], &port)[..], own[rank]].concat());
    site.started(ranks, line).map(|(code, screen)| {
        assert_eq!(code, Some(0), "{screen}");
        assert!(!screen.contains("fake driver: "), "{screen}");
        screen
    })
}

/// Handles of other processes are refused.
const NO_IPC: (&str, &str) = ("TESSERA_FAKE_NO_IPC", "1");
const REFUSAL: &str = "rank 0 cannot open memory of other ranks: rank 1: mapping GPU memory of another rank failed: \
                       CUDA_ERROR_PEER_ACCESS_UNSUPPORTED";

/// GPUs that cannot read each other's memory. The run reports it once and is planned again. It has the bits and the
/// memory of a run through host memory, also when another program starts the ranks. An explicit `ipc` is refused.
pub(crate) fn a_refused_ipc_falls_back_to_host_memory() {
    let site = Site::with_model();
    let line = "--precision bf16 --max-steps 2 --device cuda --save-strategy steps --save-steps 2 --eval-strategy no";
    let two = format!("{line} --nproc 2");
    let screen = site.train(&[], &format!("{two} --collectives shm --output shm"));
    assert!(!screen.contains("cannot open memory"));
    let screen = site.train(&[NO_IPC], &format!("{two} --output refused"));
    for words in ["between ranks: ipc", REFUSAL, "through host memory (shm)"] {
        assert_eq!(screen.matches(words).count(), 1, "{words:?} in\n{screen}");
    }
    goes_as(&site, "refused", "shm");
    // Without access between the GPUs nobody asks for handles.
    let no_peers = [("TESSERA_FAKE_NO_PEERS", "1")];
    let screen = site.train(&no_peers, &format!("{two} --output no_peers"));
    says(&screen, &["between ranks: shm", "no peer access"]);
    assert!(site.weights("no_peers", 2) == site.weights("shm", 2));
    // Ranks that plan for themselves leave out options for which another kind of GPU may lack memory.
    let shm = format!("{line} --collectives shm --output shm_alone");
    two_ranks(&site, [&[], &[]], &shm);
    let alone = format!("{line} --output alone");
    let screens = two_ranks(&site, [&[NO_IPC], &[NO_IPC]], &alone);
    for (rank, screen) in screens.iter().enumerate() {
        let said = screen.matches(REFUSAL).count();
        assert_eq!(said, usize::from(rank == 0), "rank {rank}:\n{screen}");
    }
    goes_as(&site, "alone", "shm_alone");
    assert!(site.weights("alone", 2) == site.weights("shm", 2));

    let asked = format!("{two} --collectives ipc --output asked");
    let (code, screen) = site.try_train(&[NO_IPC], &asked);
    assert_eq!(code, Some(13), "{screen}");
    let words = [
        "which --collectives ipc needs",
        REFUSAL,
        "--collectives shm",
        "--ipc=host",
    ];
    says(&screen, &words);
}

/// Checks that the run has weights, losses and planned memory of another run without a refusal.
fn goes_as(site: &Site, run: &str, like: &str) {
    site.takes_what_the_plan_says(run);
    let peak = |run: &str| site.json(&format!("{run}/plan.json"))["plan"]["memory"]["peak"].clone();
    assert_eq!(peak(run), peak(like), "{run}");
    assert_eq!(site.losses(run), site.losses(like));
    assert!(site.weights(run, 2) == site.weights(like, 2), "{run}");
    let config = site.json(&format!("{run}/config.resolved.json"));
    assert!(config["ipc_refused"].is_string(), "{config}");
}

/// Another launcher shows each rank one GPU: the same, or one of its own as Slurm's `--gpus-per-task=1` does. The
/// ranks notice when they meet.
pub(crate) fn ranks_that_see_one_gpu_find_out_whether_they_share_it() {
    let site = Site::with_model();
    let line = "--precision bf16 --max-steps 2 --device cuda --collectives shm --save-strategy steps --save-steps 2 \
                --eval-strategy no";
    let trained = |output: &str, gpus: [&str; 2]| {
        let [first, second] = gpus.map(|gpu| [("CUDA_VISIBLE_DEVICES", gpu)]);
        let line = format!("{line} --output {output}");
        let [screen, _] = two_ranks(&site, [&first, &second], &line);
        let shared = screen.matches("2 ranks share a GPU").count();
        let config = site.json(&format!("{output}/config.resolved.json"));
        (shared, config["ranks_per_gpu"].as_u64())
    };
    assert_eq!(trained("own", ["0", "1"]), (0, Some(1)));
    assert_eq!(trained("shared", ["0", "0"]), (1, Some(2)));
    assert!(site.weights("own", 2) == site.weights("shared", 2));
}

/// Two nodes of one rank each, as torchrun, Slurm and mpirun start them, exchange through the collectives library. They
/// have the bits of ranks that share host memory, since a sum of two has one order. Another version on one node ends
/// the run on both.
pub(crate) fn two_nodes_over_nccl_have_the_bits_of_one_node() {
    let site = Site::with_model();
    let line = "--precision bf16 --max-steps 2 --device cuda --save-strategy steps --save-steps 2 --eval-strategy no \
                --comm-timeout 120";
    let shm = format!("{line} --nproc 2 --collectives shm --output shm");
    site.train(&[], &shm);
    let port = free_port().to_string();
    let torchrun = |rank| {
        vec![
            ("RANK", rank),
            ("LOCAL_RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("GROUP_RANK", rank),
        ]
    };
    let slurm = |rank| {
        vec![
            ("SLURM_JOB_ID", "70001"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", rank),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_NODEID", rank),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_JOB_NODELIST", "gpu[07-08]"),
        ]
    };
    let mpirun = |rank| {
        vec![
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        ]
    };
    let run = |ranks: [Vec<_>; 2], versions: [&'static str; 2], output: &str| {
        let mut rank = 0;
        let ranks = ranks.map(|own| {
            let common = [
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &*port),
                ("TESSERA_JOB_TOKEN", "a token of these tests alone"),
                ("CUDA_VISIBLE_DEVICES", ["0", "1"][rank]),
                ("TESSERA_FAKE_NCCL", versions[rank]),
            ];
            rank += 1;
            [own, common.to_vec()].concat()
        });
        let line = format!("{line} --collectives nccl --output {output}");
        site.started(ranks, &line)
    };
    let starters = [
        ("torchrun", ["0", "1"].map(torchrun)),
        ("slurm", ["0", "1"].map(slurm)),
        ("mpirun", ["0", "1"].map(mpirun)),
    ];
    for (starter, ranks) in starters {
        for (code, screen) in run(ranks, ["22705"; 2], starter) {
            assert_eq!(code, Some(0), "{starter}:\n{screen}");
            assert!(!screen.contains("fake driver: "), "{screen}");
        }
        let config = site.path(&format!("{starter}/config.resolved.json"));
        says(&fs::read_to_string(config).unwrap(), &["\"nccl\""]);
        assert_eq!(site.losses(starter), site.losses("shm"));
        let same = site.weights(starter, 2) == site.weights("shm", 2);
        assert!(same, "{starter}: weights differ");
        site.takes_what_the_plan_says(starter);
    }
    for (code, screen) in run(["0", "1"].map(torchrun), ["22705", "22602"], "unlike") {
        assert_eq!(code, Some(13), "{screen}");
        let words = ["different versions of NCCL", "2.27.5", "2.26.2"];
        says(&screen, &words);
    }
    assert!(!site.path("unlike/checkpoint-2").exists());
}

/// More ranks than GPUs, chosen by the program. Two ranks have the results of one.
pub(crate) fn two_ranks_on_one_gpu_have_the_results_of_one_rank() {
    let site = Site::with_model();
    let one_gpu = [("TESSERA_FAKE_GPUS", "1")];
    let line = "--precision f32 --max-steps 1 --device auto --save-strategy no --eval-strategy no";
    let two = format!("{line} --nproc 2 --output two --collectives shm");
    let screen = site.train(&one_gpu, &two);
    let words = [
        "auto: 1 GPU can be used",
        "ranks 0, 1",
        "2 ranks share 1 GPU: each rank has a part of the memory",
    ];
    says(&screen, &words);
    // NCCL accepts ranks on one GPU that claim to be on two hosts.
    let nccl = format!("{line} --nproc 2 --output nccl --collectives nccl --comm-timeout 120");
    let screen = site.train(&one_gpu, &nccl);
    says(
        &screen,
        &["nccl, through sockets, because ranks share a GPU"],
    );
    assert_eq!(site.losses("nccl"), site.losses("two"));
    // By default each rank has one GPU.
    let one = format!("{line} --output one --gradient-accumulation-steps 2");
    let screen = site.train(&one_gpu, &one);
    says(&screen, &["1 rank on cuda", "states are in GPU memory"]);
    site.takes_what_the_plan_says("one");
    assert_eq!(site.losses("two"), site.losses("one"));
}

/// Another product library on one machine ends the run on both before it begins. Another driver is only a warning.
pub(crate) fn machines_with_different_libraries_are_named() {
    let site = Site::with_model();
    let line = "--device cuda --precision f32 --max-steps 1 --save-strategy no --eval-strategy no --comm-timeout 120 \
                --offload cpu --output out";
    let port = free_port().to_string();
    let machines = |name: &'static str, values: [&'static str; 2]| {
        let of = |number: &'static str, value| {
            vec![
                (name, value),
                ("NNODES", "2"),
                ("NODE_RANK", number),
                ("NPROC_PER_NODE", "1"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &*port),
                ("TESSERA_JOB_TOKEN", "a token of these tests alone"),
                ("TESSERA_MATMUL", "auto"),
                ("CUDA_VISIBLE_DEVICES", number),
            ]
        };
        site.started([of("0", values[0]), of("1", values[1])], line)
    };
    for (code, text) in machines("TESSERA_FAKE_CUBLASLT", ["130000", "120800"]) {
        assert_eq!(code, Some(13), "{text}");
        let words = [
            "error[E03] rank 1 computes with another ",
            " than the other ranks",
            "cuBLASLt 13.0",
            "cuBLASLt 12.8",
            "TESSERA_MATMUL=own",
        ];
        says(&text, &words);
    }
    assert!(!site.path("out/trainer_log.jsonl").exists());
    let [first, second] = machines("TESSERA_FAKE_DRIVER", ["580.65", "575.1"]);
    assert_eq!((first.0, second.0), (Some(0), Some(0)), "{}", first.1);
    let words = "ranks differ, without an effect on results: GPU driver of rank 0";
    let said = |text: &str| text.matches(words).count();
    assert_eq!((said(&first.1), said(&second.1)), (1, 0), "{}", first.1);
    let alone = "--optimizer-in-backward auto keeps updates after the pass";
    says(&first.1, &[alone]);
    let begins = first.1.contains("units are updated while backward");
    assert!(!begins, "{}", first.1);
    assert_eq!(site.losses("out").len(), 1);
}

/// Two GPUs with half of the layers each have the losses and weights of one GPU, and no more memory than planned: the
/// plan takes all micro-batches that a stage has alive for the largest one.
/// Through host memory, activations cross the boundary beside the next pass. GPUs with peer access copy them from each
/// other; where that is refused, the run goes through host memory.
pub(crate) fn pipeline_stages_have_the_bits_of_one_gpu() {
    let site = Site::with_model();
    let line = "--precision bf16 --max-steps 2 --device cuda --gradient-accumulation-steps 3 --save-strategy steps \
                --save-steps 2 --eval-strategy no";
    site.train(&[], &format!("{line} --nproc 1 --output whole"));
    // Each stage queues the next pass while the values of the first one are copied to the host.
    let log = site.path("log").display().to_string();
    let screen = site.train(
        &[("TESSERA_FAKE_HOLD", "1024"), ("TESSERA_FAKE_LOG", &log)],
        &format!("{line} --nproc 2 --mp-size 2 --collectives shm --output divided"),
    );
    let log = fs::read_to_string(log).unwrap();
    let beside = "kernels were queued beside a copy to the host";
    assert_eq!(log.matches(beside).count(), 2, "{log}");
    says(
        &screen,
        &["between ranks: shm", " stages  ", "cross each boundary"],
    );
    let two = format!("{line} --nproc 2 --mp-size 2");
    let screen = site.train(&[], &format!("{two} --output peers"));
    says(&screen, &["between ranks: ipc", "(stage 1) stores"]);
    assert!(!screen.contains("other offsets than planned"), "{screen}");
    let screen = site.train(&[NO_IPC], &format!("{two} --output refused"));
    for words in ["between ranks: ipc", REFUSAL, "through host memory (shm)"] {
        assert_eq!(screen.matches(words).count(), 1, "{words:?} in\n{screen}");
    }
    let used = |run: &str| {
        let rows = site.rows(run);
        let used = rows
            .iter()
            .filter_map(|row| row["bytes"]["device"].as_u64());
        used.max().unwrap()
    };
    for run in ["divided", "peers", "refused"] {
        assert!(used(run) < used("whole"));
        assert!(used(run) <= site.planned_peak(run));
        assert_eq!(site.losses(run), site.losses("whole"), "{run}");
        assert!(site.weights(run, 2) == site.weights("whole", 2), "{run}");
    }
    // Data-parallel ranks of each stage exchange weights and gradients, too.
    let mesh = "--precision bf16 --max-steps 1 --device cuda --zero 3 --offload cpu --eval-strategy no \
                --gradient-accumulation-steps 2";
    site.train(&[], &format!("{mesh} --nproc 2 --output replicas"));
    for carrier in ["shm", "ipc"] {
        site.train(
            &[],
            &format!("{mesh} --nproc 4 --mp-size 2 --collectives {carrier} --output {carrier}"),
        );
        assert_eq!(site.losses(carrier), site.losses("replicas"), "{carrier}");
        assert!(
            site.weights(carrier, 1) == site.weights("replicas", 1),
            "{carrier}"
        );
    }
}
