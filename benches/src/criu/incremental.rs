//! Captures that copy memory before the freeze beside full ones of the same process, in turns. Runs where the kernel marks
//! written pages: `cargo xtask vm bench criu-incremental`.

use crab_backend_criu::CriuBackend;
use crab_core::{CaptureRequest, CheckpointBackend, NoCut};
use crab_examples::sandbox::{Sandbox, criu_binary, home};

use super::{Holder, Outcome, checkpoint, milliseconds, p50, restore, text};
use crate::report::Report;

const MEGABYTES: usize = 256;
const CHANGED: usize = 4;
const ROUNDS: usize = 5;

/// Holds memory, and writes to a part of it again and again.
const WRITER: &str = "
import os, sys, time
size, part = int(sys.argv[1]) << 20, int(sys.argv[2]) << 20
memory = bytearray(os.urandom(1 << 20)) * (size >> 20)
with open('/root/done.new', 'w') as file:
    file.write('0')
os.rename('/root/done.new', '/root/done')
n = 0
while True:
    n = (n + 1) % 256
    for at in range(0, part, 4096):
        memory[at] = n
    time.sleep(0.01)
";

/// How long a capture stops the sandbox, in milliseconds: of an incremental one, both freezes.
async fn frozen(backend: &CriuBackend, sandbox: &Sandbox, round: usize) -> Outcome<f64> {
    let described = sandbox.describe();
    let request = CaptureRequest {
        sandbox: &described,
        artifact: format!("p{round}").parse().map_err(text)?,
        parent: None,
        frozen: false,
        deadline: None,
        at_cut: &mut NoCut,
    };
    let captured = backend.capture(request).await.map_err(text)?;
    let stopped = captured.stopped_for().ok_or("the capture does not say how long it took")?;
    captured.discard().await.map_err(text)?;
    Ok(milliseconds(stopped))
}

/// All of it.
pub(crate) fn bench(report: &mut Report) -> Outcome<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(text)?;
    runtime.block_on(async {
        let directory = home().join("pool/scratch");
        std::fs::create_dir_all(&directory).map_err(text)?;
        let scratch = tempfile::Builder::new().prefix("bench-").tempdir_in(directory).map_err(text)?;
        let open = |name: &str| CriuBackend::builder().images(scratch.path().join(name)).binary(criu_binary());
        let full = open("full").open().await.map_err(text)?;
        let incremental = open("incremental").incremental().open().await.map_err(text)?;
        if !incremental.is_incremental() {
            return Err("this kernel does not mark the pages that are written".to_owned());
        }
        let holder = Holder::run("incremental", WRITER, MEGABYTES, CHANGED)?;
        let (mut short, mut long) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            short.push(frozen(&incremental, &holder.sandbox, round).await?);
            long.push(frozen(&full, &holder.sandbox, round).await?);
        }
        report.add("incremental_frozen_ms_p50", p50(&mut short));
        report.add("full_frozen_ms_p50", p50(&mut long));
        report.add_bounded("incremental_frozen_ratio", p50(&mut short) / p50(&mut long), 0.4);
        // It must have been a dump that can be restored.
        let (artifact, _) = checkpoint(&incremental, &holder.sandbox, "last", None).await?;
        restore(&incremental, &holder.sandbox, &artifact).await?;
        Ok(())
    })
}
