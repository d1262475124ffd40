//! The resolver: what it answers, what it teaches the filter, and what it never asks.

#![allow(clippy::unwrap_used)]

mod world;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;
use netpolicy::{GATEWAY, Policy, Reason};
use std::io::{ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use world::{HOST, OTHER, SERVER, Sandbox, echo, on_a_host};

#[test]
fn an_allowed_name_leads_somewhere_and_its_address_alone_did_not() {
    on_a_host(|world| {
        world.echo(SERVER, 443);
        world.name("www.example.org", SERVER, 60);
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["tcp:*.example.org:443"]);
        assert!(sandbox.connect(SERVER, 443).is_err(), "nobody has asked for its name");
        let (code, addresses) = sandbox.ask("www.example.org.", RecordType::A);
        assert_eq!((code, &addresses[..]), (ResponseCode::NoError, &[SERVER][..]));
        let mut open = sandbox.connect(SERVER, 443).unwrap();
        echo(&mut open).unwrap();
        assert!(sandbox.connect(SERVER, 80).is_err(), "of this port the rule says nothing");
        // What one sandbox has learned is its own.
        let other = Sandbox::new(&network, &["tcp:*.example.org:443"]);
        assert_eq!(other.connect(SERVER, 443).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        // The name is forbidden: the address is, and what is open ends.
        sandbox.member.set_policy(Policy::parse(&["tcp:example.com"]).unwrap()).unwrap();
        assert!(open.read(&mut [0]).is_err());
        assert!(sandbox.connect(SERVER, 443).is_err());
    });
}

#[test]
fn questions_about_other_names_reach_nobody() {
    on_a_host(|world| {
        world.name("example.org", SERVER, 60);
        world.name("secret.evil.com", SERVER, 60);
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["example.org"]);
        let long = format!("{0}.{0}.{0}.evil.com.", "x".repeat(60));
        for name in ["secret.evil.com.", long.as_str(), "example.org.evil.com.", "a.example.org."] {
            for kind in [RecordType::A, RecordType::TXT, RecordType::AAAA, RecordType::NULL] {
                assert_eq!(sandbox.ask(name, kind), (ResponseCode::NXDomain, vec![]), "{name}");
            }
        }
        let denial = sandbox.denied(|d| d.name == "secret.evil.com.");
        assert_eq!((denial.reason, denial.protocol.as_str()), (Reason::NotAllowed, "dns"));
        // Of an allowed name nothing but addresses is asked, and nothing of the message is passed on.
        for kind in [RecordType::TXT, RecordType::AAAA, RecordType::MX, RecordType::ANY] {
            assert_eq!(sandbox.ask("example.org.", kind), (ResponseCode::NoError, vec![]));
        }
        assert_eq!(world.asked(), Vec::<String>::new());
        assert_eq!(sandbox.ask("eXaMpLe.ORG.", RecordType::A).1, [SERVER]);
        assert_eq!(world.asked(), ["example.org."], "the case of letters carries bits as well");
    });
}

#[test]
fn a_name_never_opens_what_no_name_may_open() {
    on_a_host(|world| {
        let metadata = Ipv4Addr::new(169, 254, 169, 254);
        let inside = Ipv4Addr::new(10, 0, 0, 7);
        for address in [metadata, inside, HOST, Ipv4Addr::LOCALHOST, GATEWAY, SERVER] {
            world.name("rebind.example.org", address, 60);
        }
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["*.example.org"]);
        assert_eq!(sandbox.ask("rebind.example.org.", RecordType::A).1, [SERVER]);
        for address in [metadata, inside, HOST] {
            let denial = sandbox.denied(|d| d.address == Some(address.into()));
            assert_eq!(
                (denial.reason, denial.name.as_str()),
                (Reason::Never, "rebind.example.org")
            );
            assert!(sandbox.connect(address, 80).is_err());
        }
    });
}

#[test]
fn questions_are_limited_and_broken_ones_are_survived() {
    on_a_host(|world| {
        world.name("x.example.org", OTHER, 60);
        let network = world.network();
        let sandbox = Sandbox::new(&network, &["*.example.org"]);
        let mut refused = 0;
        for number in 0..150 {
            let (code, _) = sandbox.ask(&format!("bits{number}.example.org."), RecordType::A);
            refused += usize::from(code == ResponseCode::Refused);
        }
        assert!(refused > 0);
        assert_eq!(world.asked().len() + refused, 150);
        sandbox.denied(|d| d.reason == Reason::Limit);
        // Streams: a length that lies, and rubbish.
        for bytes in [&b"\xff\xff"[..], b"\x00\x03abc", b"\x00\x00"] {
            let mut stream = sandbox.connect(GATEWAY, 53).unwrap();
            stream.write_all(bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert!(matches!(stream.read(&mut [0; 9]), Ok(0) | Err(_)));
        }
        assert_eq!(sandbox.ask("no.where.", RecordType::A).0, ResponseCode::NXDomain);
    });
}
