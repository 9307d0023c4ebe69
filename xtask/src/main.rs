//! Project tasks: `cargo xtask help` lists them.
//!
//! No dependencies on purpose: this program is what makes a machine ready for
//! everything else, so it has to build in seconds.

mod bpf;
mod command;
mod setup;
mod tasks;
mod vm;

use std::process::ExitCode;

const USAGE: &str = "\
Usage: cargo xtask TASK

Tasks:
  setup [--check] [--agents] [--browser]
                             make this machine ready: host packages, CRIU, the btrfs pool, the
                             sandboxes' root filesystem. With --check, only say what is missing.
                             With --agents, also real agents (npm, PyPI) for the tests that drive them;
                             with --browser, a headless Chromium for the test that opens the evaluation's page
  demo [--seed N] [--crash-at TURN|random] [--json FILE]
                             setup, then the main job to watch: an agent's sandbox and Crab are killed at
                             six moments, and each time the work ends as if nothing had happened
  eval [--traces DIR] [--quick] [--seed N] [--json FILE] [--html FILE] [--timeline FILE] [--keep FILE]
       [--only PART]         setup, then agent sessions under several ways to recover, crashed, moved, branched,
                             and many at once; a report. --keep goes on where an earlier run with it ended
  test [--no-vm] [ARGS...]   setup, then `cargo test --workspace ARGS`, then the tests that need a virtual
                             machine where there are no ARGS; says what was skipped. --no-vm leaves
                             the virtual machine out
  vm test [--filter TEXT]    only the tests that need a virtual machine; `vm bench NAME` runs a bench in it,
                             `vm build` makes its image
  bench NAME [--json FILE]   setup, then one bench, built for speed; without a name, lists them
  accuracy [--traces DIR] [--count N] [--json FILE]
                             setup, then recorded sessions in a sandbox, each turn's verdict beside the truth
  bpf [--check]              the BPF objects from their source; with --check, whether they are the committed ones
  help                       this text

Environment:
  CRAB_HOME                  where setup puts things (default /var/lib/crab)
  CRAB_VM                    an image of the virtual machine, packed or a directory (default CRAB_HOME/vm)
  CRAB_VM_ACCEL              how QEMU runs it, such as kvm (default: emulated, which works anywhere)
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (task, rest) = match arguments.split_first() {
        Some((task, rest)) => (task.as_str(), rest),
        None => ("help", &[][..]),
    };
    let outcome = match task {
        "setup" => setup::main(rest),
        "demo" => tasks::demo(rest),
        "eval" => tasks::eval(rest),
        "test" => tasks::test(rest),
        "vm" => vm::main(rest),
        "bench" => tasks::bench(rest),
        "accuracy" => tasks::accuracy(rest),
        "bpf" => bpf::main(rest),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        other => Err(format!("there is no task `{other}`\n\n{USAGE}")),
    };
    outcome.unwrap_or_else(|message| {
        eprintln!("xtask: {message}");
        ExitCode::FAILURE
    })
}
