//! Round trips over iceoryx2 between two processes, both polling without pause.
//!
//! `iceoryx2_peer serve-request|serve-publish NAME BYTES CPU` answers until it is killed;
//! `iceoryx2_peer request|publish NAME BYTES ROUNDS WARMUP BLOCK CPU` measures: each block of rounds is one sample, printed as
//! one line of JSON. The payload is copied in and out on both sides, as our crate does.

#[path = "../../../support/floor.rs"]
mod floor;
#[path = "../report.rs"]
mod report;

use std::time::{Duration, Instant};

use iceoryx2::prelude::*;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (role, name) = (arguments.next().unwrap_or_default(), arguments.next().unwrap_or_default());
    set_log_level(LogLevel::Error);
    match role.as_str() {
        "serve-request" => serve_request(&name, report::numbers()),
        "serve-publish" => serve_publish(&name, report::numbers()),
        "request" => request(&name, report::numbers()),
        "publish" => publish(&name, report::numbers()),
        _ => Err("see the head of the source file for the arguments".into()),
    }
}

/// Samples of whole rounds.
fn measure([rounds, warmup, block]: [usize; 3], mut round: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 0..warmup {
        round()?;
    }
    let mut samples = Vec::with_capacity(rounds / block);
    for _ in 0..rounds / block {
        let began = Instant::now();
        for _ in 0..block {
            round()?;
        }
        samples.push(began.elapsed().as_nanos() as f64 / block as f64);
    }
    report::print(samples);
    Ok(())
}

/// Waits until the other side is there.
fn wait(mut there: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !there() {
        if Instant::now() > deadline {
            return Err("the other side has not come within 10 s".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

macro_rules! request_response {
    ($node:ident, $name:ident) => {
        $node.service_builder(&$name.try_into()?).request_response::<[u8], [u8]>().open_or_create()?
    };
}

fn serve_request(name: &str, [bytes, cpu]: [usize; 2]) -> Result<()> {
    floor::pin(cpu);
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service = request_response!(node, name);
    let server = service.server_builder().initial_max_slice_len(bytes).create()?;
    let mut payload = vec![0; bytes];
    loop {
        if let Some(request) = server.receive()? {
            payload.copy_from_slice(request.payload());
            request.loan_slice_uninit(bytes)?.write_from_slice(&payload).send()?;
        }
        std::hint::spin_loop();
    }
}

fn request(name: &str, [bytes, rounds, warmup, block, cpu]: [usize; 5]) -> Result<()> {
    floor::pin(cpu);
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let service = request_response!(node, name);
    let client = service.client_builder().initial_max_slice_len(bytes).create()?;
    wait(|| service.dynamic_config().number_of_servers() > 0)?;
    let mut payload = vec![7; bytes];
    measure([rounds, warmup, block], || {
        let pending = client.loan_slice_uninit(bytes)?.write_from_slice(&payload).send()?;
        loop {
            if let Some(response) = pending.receive()? {
                payload.copy_from_slice(response.payload());
                return Ok(());
            }
            std::hint::spin_loop();
        }
    })
}

macro_rules! publish_subscribe {
    ($node:ident, $name:expr) => {
        $node.service_builder(&$name.as_str().try_into()?).publish_subscribe::<[u8]>().open_or_create()?
    };
}

fn serve_publish(name: &str, [bytes, cpu]: [usize; 2]) -> Result<()> {
    floor::pin(cpu);
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let (there, back) = (format!("{name}/there"), format!("{name}/back"));
    let (there, back) = (publish_subscribe!(node, there), publish_subscribe!(node, back));
    let publisher = back.publisher_builder().initial_max_slice_len(bytes).create()?;
    let subscriber = there.subscriber_builder().create()?;
    let mut payload = vec![0; bytes];
    loop {
        if let Some(sample) = subscriber.receive()? {
            payload.copy_from_slice(sample.payload());
            publisher.loan_slice_uninit(bytes)?.write_from_slice(&payload).send()?;
        }
        std::hint::spin_loop();
    }
}

fn publish(name: &str, [bytes, rounds, warmup, block, cpu]: [usize; 5]) -> Result<()> {
    floor::pin(cpu);
    let node = NodeBuilder::new().create::<ipc::Service>()?;
    let (there, back) = (format!("{name}/there"), format!("{name}/back"));
    let (there, back) = (publish_subscribe!(node, there), publish_subscribe!(node, back));
    let publisher = there.publisher_builder().initial_max_slice_len(bytes).create()?;
    let subscriber = back.subscriber_builder().create()?;
    wait(|| there.dynamic_config().number_of_subscribers() > 0 && back.dynamic_config().number_of_publishers() > 0)?;
    let mut payload = vec![7; bytes];
    measure([rounds, warmup, block], || {
        publisher.loan_slice_uninit(bytes)?.write_from_slice(&payload).send()?;
        loop {
            if let Some(sample) = subscriber.receive()? {
                payload.copy_from_slice(sample.payload());
                return Ok(());
            }
            std::hint::spin_loop();
        }
    })
}
