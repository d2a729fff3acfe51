//! Server for benchmarks: `adam_step PARAMETERS THREADS [STEPS]`. For every variant name on standard input it runs one
//! `AdamW` step, or `STEPS`. It answers with the wall time and the processor time of one in seconds.
//! `scripts/adam_peers.py` alternates it with other programs.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program that answers on standard output"
)]

use benches::adam::{Buffers, Variant};
use std::error::Error;
use std::io::{BufRead, Write};
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    let usage = "usage: adam_step PARAMETERS THREADS [STEPS], then names on standard input";
    let mut args = std::env::args().skip(1);
    let elems: usize = args.next().ok_or(usage)?.parse()?;
    let threads = args.next().ok_or(usage)?.parse()?;
    let steps: u32 = args.next().map_or(Ok(1), |steps| steps.parse())?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()?;
    let mut buffers = Buffers::new(elems);
    let mut known = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let variant = Variant::named(line.trim()).ok_or("unknown variant")?;
        if !known.contains(&variant.name) {
            // The first step allocates the buffers.
            pool.install(|| buffers.run(variant));
            known.push(variant.name);
        }
        let (start, processor) = (Instant::now(), processor_seconds()?);
        pool.install(|| (0..steps).for_each(|_| buffers.run(variant)));
        let (wall, processor) = (
            start.elapsed().as_secs_f64() / f64::from(steps),
            (processor_seconds()? - processor) / f64::from(steps),
        );
        println!("{wall:.9} {processor:.9}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Processor time of all threads in seconds, if the system reports it.
fn processor_seconds() -> Result<f64, Box<dyn Error>> {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return Ok(0.0);
    };
    let mut nanoseconds = 0.0;
    for task in tasks {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().unwrap_or("0").parse::<f64>()?;
    }
    Ok(nanoseconds * 1e-9)
}
