from g4spec.cli import main

if __name__ == "__main__":
    main()
