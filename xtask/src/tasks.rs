//! The tasks that wrap cargo: each makes the machine ready first.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use crate::{setup, vm};

/// Leaves the virtual machine out.
const NO_VM: &str = "--no-vm";

/// `cargo xtask test`: setup, the whole workspace's tests, those that need the virtual machine, and a list of what was
/// skipped.
pub(crate) fn test(arguments: &[String]) -> Result<ExitCode, String> {
    ready()?;
    let without_vm = arguments.iter().take_while(|a| *a != "--").any(|a| a == NO_VM);
    let arguments: Vec<String> = arguments.iter().filter(|a| *a != NO_VM).cloned().collect();
    let arguments = arguments.as_slice();
    // Without --show-output, the harness would swallow the `skipped:` lines of tests that pass.
    let (cargo_arguments, harness_arguments) = match arguments.iter().position(|a| a == "--") {
        Some(at) => (&arguments[..at], &arguments[at + 1..]),
        None => (arguments, &[][..]),
    };
    let names_packages = cargo_arguments.iter().any(|a| a.starts_with("-p") || a.starts_with("--package"));
    let mut command = cargo();
    command
        .args(["test", "--no-fail-fast"])
        // cargo would take the whole workspace besides the packages that the user names.
        .args((!names_packages).then_some("--workspace"))
        .args(cargo_arguments)
        .args(["--", "--show-output"])
        .args(harness_arguments)
        .stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot start cargo: {error}"))?;
    let mut skipped = Vec::new();
    // The last `test result:` line, kept back so that it closes the run.
    let mut closing: Option<String> = None;
    if let Some(stdout) = child.stdout.take() {
        let mut reader = BufReader::new(stdout);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).map_err(|error| format!("lost the output of cargo test: {error}"))?
            > 0
        {
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end();
            if let Some(what) = text.trim_start().strip_prefix("skipped: ") {
                skipped.push(what.to_owned());
            }
            if text.starts_with("test result:") {
                if let Some(earlier) = closing.replace(text.to_owned()) {
                    println!("{earlier}");
                }
            } else {
                if !text.is_empty()
                    && let Some(earlier) = closing.take()
                {
                    println!("{earlier}");
                }
                println!("{text}");
            }
            line.clear();
        }
    }
    let status = child.wait().map_err(|error| format!("lost cargo test: {error}"))?;
    skipped.sort();
    skipped.dedup();
    let in_vm = if without_vm {
        Err(format!("the virtual machine ({NO_VM})"))
    } else if !arguments.is_empty() {
        Err("the virtual machine (it runs only without arguments; see `cargo xtask vm test`)".to_owned())
    } else {
        println!("xtask: now the tests that need a virtual machine ({NO_VM} leaves them out)");
        match vm::image() {
            Ok(image) => Ok(vm::run_suites(&image, None)),
            Err(message) => Err(format!("the virtual machine ({message})")),
        }
    };
    println!("xtask: {} kinds of test skipped on this machine", skipped.len());
    for what in &skipped {
        println!("xtask:   skipped: {what}");
    }
    let vm_is_good = match in_vm {
        Ok(Ok(outcome)) => {
            outcome.print();
            outcome.is_good()
        }
        Ok(Err(message)) => {
            println!("xtask: the tests in the virtual machine FAILED: {message}");
            false
        }
        Err(message) => {
            println!("xtask:   skipped: {message}");
            true
        }
    };
    if let Some(last) = closing {
        println!("\n{last}\n");
    }
    Ok(if vm_is_good { exit_code(status) } else { ExitCode::FAILURE })
}

/// `cargo xtask bench NAME [--json FILE]`: setup, then one bench, built for speed.
pub(crate) fn bench(arguments: &[String]) -> Result<ExitCode, String> {
    ready()?;
    optimized("bench", "crab-benches", "crab-bench", arguments)
}

/// `cargo xtask demo [ARGS...]`: setup, then the demo, built for speed.
pub(crate) fn demo(arguments: &[String]) -> Result<ExitCode, String> {
    ready()?;
    println!("xtask: building the demo");
    release("crab-examples", "demo", arguments)
}

/// `cargo xtask accuracy [ARGS...]`: setup, then the inspector's verdicts on recorded work beside the truth.
pub(crate) fn accuracy(arguments: &[String]) -> Result<ExitCode, String> {
    ready()?;
    release("crab-benches", "crab-accuracy", arguments)
}

/// `cargo xtask eval [ARGS...]`: setup, then the evaluation, built for speed.
pub(crate) fn eval(arguments: &[String]) -> Result<ExitCode, String> {
    ready()?;
    // It runs this one too.
    let build = ["build", "--release", "--package", "crab-benches", "--bin", "crab-accuracy"];
    let status = cargo().args(build).status().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !status.success() {
        return Ok(exit_code(status));
    }
    release("crab-benches", "crab-eval", arguments)
}

/// Builds a program of the workspace for speed and runs it.
fn release(package: &str, program: &str, arguments: &[String]) -> Result<ExitCode, String> {
    optimized("release", package, program, arguments)
}

/// The same under one of the profiles in `Cargo.toml`.
fn optimized(profile: &str, package: &str, program: &str, arguments: &[String]) -> Result<ExitCode, String> {
    let status = cargo()
        .args(["run", "--profile", profile, "--package", package, "--bin", program, "--"])
        .args(arguments)
        .status()
        .map_err(|error| format!("cannot start cargo: {error}"))?;
    Ok(exit_code(status))
}

fn ready() -> Result<(), String> {
    println!("xtask: making this machine ready first (cargo xtask setup)");
    setup::install()
}

/// cargo, told where setup put things.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let home = setup::Home::from_environment();
    command.env("CRAB_HOME", home.path());
    command.env("CRAB_CRIU", home.criu_binary());
    command
}

fn exit_code(status: ExitStatus) -> ExitCode {
    match status.code().map(u8::try_from) {
        Some(Ok(code)) => ExitCode::from(code),
        _ => ExitCode::FAILURE,
    }
}
